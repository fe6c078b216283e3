//! Dates as Python's `strftime` writes them, in UTC: the time zone of a machine is not asked for.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const SECONDS_A_DAY: u64 = 86_400;
const DAYS_A_YEAR: [u64; 2] = [365, 366];

/// `now` in a format of `strftime`; `%-d` is `%d` without its zero in front.
pub(super) fn formatted(format: &str, now: SystemTime) -> Result<String, Error> {
    // A clock before 1970 is a clock that was never set.
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let date = Date::of(seconds / SECONDS_A_DAY);
    let of_day = seconds % SECONDS_A_DAY;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let mut out = String::with_capacity(2 * format.len());
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        let is_padded = directive != Some('-');
        if !is_padded {
            directive = rest.next();
        }
        let (value, width) = match directive {
            Some('Y') => (date.year, 4),
            Some('y') => (date.year % 100, 2),
            Some('m') => (date.month as u64 + 1, 2),
            Some('d') => (date.day + 1, 2),
            Some('j') => (date.day_of_year + 1, 3),
            Some('H') => (hour, 2),
            Some('I') => ((hour + 11) % 12 + 1, 2),
            Some('M') => (minute, 2),
            Some('S') => (second, 2),
            Some(other) => {
                out.push_str(match other {
                    'B' => date.month_name(),
                    'b' => &date.month_name()[..3],
                    'A' => date.day_name(),
                    'a' => &date.day_name()[..3],
                    'p' if hour < 12 => "AM",
                    'p' => "PM",
                    'Z' => "UTC",
                    'z' => "+0000",
                    '%' => "%",
                    _ => return Err(unknown(format, other)),
                });
                continue;
            }
            None => return Err(unknown(format, '%')),
        };
        let width = if is_padded { width } else { 0 };
        let _ = write!(out, "{value:0width$}");
    }
    Ok(out)
}

fn unknown(format: &str, directive: char) -> Error {
    let text = format!("strftime_now: {directive:?} of {format:?} is not a part of dates");
    Error::new(ErrorKind::InvalidOperation, text)
}

/// A day of the Gregorian calendar. Months and days count from 0.
struct Date {
    year: u64,
    month: usize,
    day: u64,
    day_of_year: u64,
    day_of_week: usize,
}

impl Date {
    /// The day that many days after 1 January 1970, a Thursday.
    fn of(days: u64) -> Self {
        // Years repeat after 400; what is beyond them is a clock gone mad, and still no loop of ages.
        let (mut rest, mut year) = (days % 146_097, 1970 + days / 146_097 * 400);
        let length = |year: u64| DAYS_A_YEAR[usize::from(is_leap(year))];
        while rest >= length(year) {
            rest -= length(year);
            year += 1;
        }
        let day_of_year = rest;
        let february = if is_leap(year) { 29 } else { 28 };
        let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 0;
        for length in lengths {
            if rest < length {
                break;
            }
            rest -= length;
            month += 1;
        }
        Self { year, month, day: rest, day_of_year, day_of_week: ((days + 4) % 7) as usize }
    }

    fn month_name(&self) -> &'static str {
        MONTHS.get(self.month).copied().unwrap_or_default()
    }

    fn day_name(&self) -> &'static str {
        DAYS.get(self.day_of_week).copied().unwrap_or_default()
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Expected texts are those of Python's datetime in UTC.
    #[test]
    fn dates_are_those_of_python() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %d %B %b %y %j %I %p %-d %-m %Z %z %%";
        for (seconds, expect) in [
            (0, "1970-01-01 00:00:00 Thursday Thu 01 January Jan 70 001 12 AM 1 1 UTC +0000 %"),
            (
                951782399,
                "2000-02-28 23:59:59 Monday Mon 28 February Feb 00 059 11 PM 28 2 UTC +0000 %",
            ),
            (
                951782400,
                "2000-02-29 00:00:00 Tuesday Tue 29 February Feb 00 060 12 AM 29 2 UTC +0000 %",
            ),
            (
                951868800,
                "2000-03-01 00:00:00 Wednesday Wed 01 March Mar 00 061 12 AM 1 3 UTC +0000 %",
            ),
            (
                1078099199,
                "2004-02-29 23:59:59 Sunday Sun 29 February Feb 04 060 11 PM 29 2 UTC +0000 %",
            ),
            (
                1709210096,
                "2024-02-29 12:34:56 Thursday Thu 29 February Feb 24 060 12 PM 29 2 UTC +0000 %",
            ),
            (
                1735689599,
                "2024-12-31 23:59:59 Tuesday Tue 31 December Dec 24 366 11 PM 31 12 UTC +0000 %",
            ),
            (
                4107542400,
                "2100-03-01 00:00:00 Monday Mon 01 March Mar 00 060 12 AM 1 3 UTC +0000 %",
            ),
            (
                32503679999,
                "2999-12-31 23:59:59 Tuesday Tue 31 December Dec 99 365 11 PM 31 12 UTC +0000 %",
            ),
            (
                1767225599,
                "2025-12-31 23:59:59 Wednesday Wed 31 December Dec 25 365 11 PM 31 12 UTC +0000 %",
            ),
        ] {
            let now = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(formatted(all, now).unwrap(), expect);
        }
    }

    #[test]
    fn what_is_not_a_date_is_named() {
        for (format, part) in [("%Y %Q", "'Q'"), ("%", "'%'"), ("%-", "'%'"), ("%é", "'é'")] {
            let error = formatted(format, UNIX_EPOCH).unwrap_err().to_string();
            assert!(error.contains(part), "{format}: {error}");
        }
        assert_eq!(formatted("no date", UNIX_EPOCH).unwrap(), "no date");
    }
}
