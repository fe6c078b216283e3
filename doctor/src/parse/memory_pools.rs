//! Memory that has a use of its own: huge pages, ZFS's cache, what may be locked.
//!
//! Refuses to take an unreadable figure for none.

use super::{ParseError, excerpt, number};

/// The page size in the name of a folder of `/sys/kernel/mm/hugepages`: `hugepages-2048kB`.
pub fn parse_huge_page_folder(name: &str) -> Option<u64> {
    let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    kib.checked_mul(1024).filter(|&bytes| bytes > 0)
}

/// The choice in brackets of a file such as `always [madvise] never`.
pub fn parse_choice(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    let (choice, _) = rest.split_once(']')?;
    Some(choice.trim()).filter(|choice| !choice.is_empty())
}

/// Figures of `/proc/spl/kstat/zfs/arcstats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArcStats {
    /// `size`: what the cache holds.
    pub size_bytes: u64,
    /// `c_min`: what it keeps however little memory there is.
    pub least_bytes: u64,
}

/// Reads `/proc/spl/kstat/zfs/arcstats`: lines of a name, a type and a number.
///
/// # Errors
///
/// A text without `size` or `c_min`.
pub fn parse_arcstats(text: &str) -> Result<ArcStats, ParseError> {
    let value = |what: &'static str| {
        let of_line = |line: &str| {
            let mut words = line.split_whitespace();
            let is_it = words.next() == Some(what);
            let data = words.nth(1)?.parse().ok()?;
            is_it.then_some(data)
        };
        let found = text.lines().find_map(of_line);
        found.ok_or(ParseError::NotANumber { what, found: "no such line".to_owned() })
    };
    Ok(ArcStats { size_bytes: value("size")?, least_bytes: value("c_min")? })
}

/// The soft limit of `Max locked memory` in `/proc/<pid>/limits`, in bytes. `None` is no limit.
///
/// # Errors
///
/// A text without such a line, and one that says neither a number nor `unlimited`.
pub fn parse_locked_limit(text: &str) -> Result<Option<u64>, ParseError> {
    const NAME: &str = "Max locked memory";
    let line = text.lines().find_map(|line| line.strip_prefix(NAME));
    let words = line.ok_or(ParseError::NotANumber { what: NAME, found: excerpt(text) })?;
    match words.split_whitespace().next() {
        Some("unlimited") => Ok(None),
        word => number(NAME, word.unwrap_or_default()).map(Some),
    }
}

/// Whether `CapEff` of `/proc/<pid>/status` has CAP_IPC_LOCK (14), which no limit binds.
pub fn can_lock_all(status: &str) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_and_choices() {
        assert_eq!(parse_huge_page_folder("hugepages-1048576kB"), Some(1 << 30));
        for name in [
            "hugepages-0kB",
            "hugepages-kB",
            "hugepages-2048",
            "x",
            "hugepages-99999999999999999999kB",
        ] {
            assert_eq!(parse_huge_page_folder(name), None, "{name}");
        }
        assert_eq!(parse_choice("always [madvise] never\n"), Some("madvise"));
        assert_eq!(parse_choice("always madvise"), None);
        assert_eq!(parse_choice("[]"), None);
    }

    #[test]
    fn arc() {
        let text = "13 1 0x01 123 33456 1 2\nname type data\nhits 4 9\nc_min 4 1000\nsize 4 5000\n";
        let stats = ArcStats { size_bytes: 5000, least_bytes: 1000 };
        assert_eq!(parse_arcstats(text), Ok(stats));
        assert!(parse_arcstats("name type data\nsize 4 5000\n").is_err());
    }

    #[test]
    fn locked() {
        let line = |soft| format!("Max locked memory   {soft}   {soft}   bytes\n");
        assert_eq!(parse_locked_limit(&line("8388608")), Ok(Some(8 << 20)));
        assert_eq!(parse_locked_limit(&line("unlimited")), Ok(None));
        assert!(parse_locked_limit(&line("x")).is_err() && parse_locked_limit("").is_err());
        assert!(can_lock_all("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!can_lock_all("CapEff:\t00000000a80425fb\n") && !can_lock_all("CapEff:\tx\n"));
    }
}
