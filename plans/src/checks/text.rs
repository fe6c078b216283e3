//! How lists and counts are said in one line.

/// `1 file`, `3 files`.
pub(super) fn count(n: usize, one: &str) -> String {
    crate::units::counted(n as u64, one)
}

/// The first few of a list, and how many more there are.
pub(super) fn first_few(items: &[String], most: usize) -> String {
    let shown = items.iter().take(most).cloned().collect::<Vec<_>>().join(", ");
    match items.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Ascending numbers as ranges: `0-3,8`.
pub(super) fn ranges(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if number == *last => {}
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let one = |(first, last): (u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(one).collect::<Vec<_>>().join(",")
}

/// How many numbers a list such as `0-3,8` names; `None` where it is no such list.
pub(super) fn listed(list: &str) -> Option<u64> {
    let mut n = 0_u64;
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        n = n.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(n)
}

/// A rate in units of 1e9.
pub(super) fn rate(bytes_per_s: f64) -> String {
    if bytes_per_s < 1e9 {
        format!("{:.0} MB/s", bytes_per_s / 1e6)
    } else {
        format!("{:.1} GB/s", bytes_per_s / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_said_shortly_and_lose_no_count() {
        let names: Vec<String> = ["a", "b", "c"].map(str::to_owned).into();
        assert_eq!(first_few(&names, 2), "a, b and 1 more");
        assert_eq!(first_few(&names, 3), "a, b, c");
        assert_eq!(ranges([0, 1, 2, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ranges([u32::MAX]), "4294967295");
        assert_eq!((count(1, "file"), count(2, "file")), ("1 file".into(), "2 files".into()));
    }

    #[test]
    fn lists_of_cpus_are_counted_and_nothing_else_is() {
        for (list, n) in [("0", Some(1)), ("0-3,8", Some(5)), (" 0-7,16-23\n", Some(16))] {
            assert_eq!(listed(list), n, "{list}");
        }
        for odd in ["", "a", "3-1", "0-", "0-18446744073709551615", "-1"] {
            assert_eq!(listed(odd), None, "{odd}");
        }
    }
}
