//! What an answer to a ranged request says of itself, checked against what was asked. Pure.

/// `bytes first-last/total` of a Content-Range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentRange {
    /// First and last byte; `None` where the range was beyond the end.
    pub(crate) span: Option<(u64, u64)>,
    /// Size of the whole file, where it is told.
    pub(crate) total: Option<u64>,
}

impl ContentRange {
    /// Parses the header's value; `None` for anything that RFC 9110 does not allow.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let rest = text.trim();
        let rest =
            rest.get(..6).filter(|unit| unit.eq_ignore_ascii_case("bytes ")).and(rest.get(6..))?;
        let (span, total) = rest.trim().split_once('/')?;
        let number = |text: &str| {
            let is_digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse::<u64>().ok().filter(|_| is_digits)
        };
        let total = match total.trim() {
            "*" => None,
            total => Some(number(total)?),
        };
        let span = match span.trim() {
            "*" => None,
            span => {
                let (first, last) = span.split_once('-')?;
                let (first, last) = (number(first)?, number(last)?);
                if first > last || total.is_some_and(|total| last >= total) {
                    return None;
                }
                Some((first, last))
            }
        };
        if span.is_none() && total.is_none() {
            return None;
        }
        Some(Self { span, total })
    }

    /// Whether the span is what was asked for: `start..end`, cut off at the end of the file only.
    pub(crate) fn answers(&self, start: u64, end: u64) -> bool {
        let Some((first, last)) = self.span else { return false };
        let expected_end = self.total.map_or(end, |total| end.min(total));
        first == start && last.checked_add(1) == Some(expected_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_whole_and_true_ranges_are_believed() {
        let parse = |text: &str| ContentRange::parse(text);
        assert_eq!(
            parse("bytes 0-7/123"),
            Some(ContentRange { span: Some((0, 7)), total: Some(123) })
        );
        assert_eq!(parse("bytes */5"), Some(ContentRange { span: None, total: Some(5) }));
        assert_eq!(parse("bytes 8-9/*"), Some(ContentRange { span: Some((8, 9)), total: None }));
        for wrong in [
            "",
            "bytes",
            "bytes 0-7",
            "items 0-7/9",
            "bytes 7-0/9",
            "bytes 0-9/9",
            "bytes -7/9",
            "bytes 0-/9",
            "bytes */*",
            "bytes 0-7/99999999999999999999",
            "bytes +0-7/9",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_answer_is_what_was_asked_for_up_to_the_end_of_the_file() {
        let answers =
            |text: &str, start, end| ContentRange::parse(text).unwrap().answers(start, end);
        assert!(answers("bytes 0-7/100", 0, 8));
        assert!(answers("bytes 90-99/100", 90, 120));
        assert!(!answers("bytes 0-6/100", 0, 8), "too little");
        assert!(!answers("bytes 0-8/100", 0, 8), "too much");
        assert!(!answers("bytes 1-8/100", 0, 8), "elsewhere");
        assert!(!answers("bytes */100", 0, 8));
        assert!(answers("bytes 0-7/*", 0, 8));
    }

    proptest! {
        #[test]
        fn arbitrary_values_never_panic(text in "(bytes )?[0-9*/ -]{0,30}", start: u64, end: u64) {
            if let Some(range) = ContentRange::parse(&text) {
                let _ = range.answers(start, end);
            }
        }
    }
}
