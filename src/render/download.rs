//! What a download would be: how much, to which disk, how long, and what was looked at to say so.

use serde_json::{Value, json};
use tierkeep_hub::Part;
use tierkeep_plans::units::Bytes;

use super::style::{Style, Tone};
use crate::commands::model::{DownloadAnswer, DownloadRate};

/// The answer for people.
pub(crate) fn download(answer: &DownloadAnswer, style: Style) -> String {
    let snapshot = &answer.snapshot;
    let mut text = style.heading("before the download");
    text += &style.paragraph("  download  ", &size_with_rest(answer));
    text += &style.paragraph("  disk      ", &disk(answer, style));
    let time = download_time(answer).unwrap_or_else(|| {
        "not measured, for too little came over the network: give --bandwidth 100MB/s".to_owned()
    });
    text += &style.paragraph("  time      ", &time);
    text += &style.paragraph("  with      ", &answer.how());
    let transfer = &snapshot.transfer;
    let looked = format!(
        "{} in {} requests; {} headers of {}, {} of them from the cache",
        Bytes(transfer.bytes),
        transfer.n_requests,
        transfer.n_cached + transfer.n_fetched,
        Bytes(transfer.head_bytes),
        transfer.n_cached,
    );
    text += &style.paragraph("  looked at ", &looked);
    if let (Some(at), Some(reason)) = (snapshot.as_of_unix_s, &snapshot.offline_reason) {
        text +=
            &style.paragraph("  as of     ", &format!("{}, from the cache: {reason}", date(at)));
    }
    text
}

/// How much is to be downloaded, in a few words.
pub(crate) fn download_size(answer: &DownloadAnswer) -> String {
    part(&answer.download.needed)
}

fn part(part: &Part) -> String {
    let at_least = if part.n_unknown > 0 { "at least " } else { "" };
    format!("{at_least}{} in {} files", Bytes(part.bytes), part.n_files)
}

fn size_with_rest(answer: &DownloadAnswer) -> String {
    let download = &answer.download;
    let mut text = format!("{}: weights, configs and tokenizer", part(&download.needed));
    if download.all != download.needed {
        text += &format!(", of {} in all", part(&download.all));
    }
    text += if download.is_listing_complete { " (by the listing)" } else { " (by the index)" };
    if download.present.n_files > 0 {
        text += &format!(
            "; {} are in the hub cache already, {} to come",
            part(&download.present),
            Bytes(download.remaining_bytes())
        );
    }
    text
}

fn disk(answer: &DownloadAnswer, style: Style) -> String {
    let target = answer.target.display();
    let Some(&free) = answer.free_bytes.value() else {
        return format!("free space at {target} is unknown: {}", answer.free_bytes.detail());
    };
    let short = answer.download.short_bytes(free);
    let verdict = if short == 0 {
        style.paint(Tone::Ok, "enough")
    } else {
        style.paint(Tone::Fail, &format!("{} short", Bytes(short)))
    };
    format!("{} free at {target} ({}): {verdict}", Bytes(free), answer.free_bytes.source())
}

/// How long the download takes and where the figure is from; `None` where there is none.
pub(crate) fn download_time(answer: &DownloadAnswer) -> Option<String> {
    let seconds = |rate| duration(answer.download.seconds_at(rate));
    match answer.rate {
        DownloadRate::Given(rate) => Some(format!("{} at {rate} (as given)", seconds(rate))),
        DownloadRate::Measured(measured) => Some(format!(
            "{} at most, at {} (measured over {} of header requests on {}: a lower bound)",
            seconds(measured.rate),
            measured.rate,
            Bytes(measured.bytes),
            date(measured.at_unix_s),
        )),
        DownloadRate::NotMeasured => None,
    }
}

/// The answer for programs.
pub(crate) fn download_json(answer: &DownloadAnswer) -> Value {
    let snapshot = &answer.snapshot;
    let (rate_source, measured_over_bytes) = match answer.rate {
        DownloadRate::Given(_) => ("given", None),
        DownloadRate::Measured(measured) => ("measured", Some(measured.bytes)),
        DownloadRate::NotMeasured => ("unknown", None),
    };
    let rate = answer.rate.rate();
    json!({
        "name": snapshot.name,
        "page": snapshot.page,
        "repo": snapshot.repo,
        "commit": snapshot.commit,
        "download": answer.download,
        "remaining_bytes": answer.download.remaining_bytes(),
        "target": answer.target,
        "free_bytes": answer.free_bytes,
        "short_bytes": answer.free_bytes.value().map(|&free| answer.download.short_bytes(free)),
        "bytes_per_s": rate,
        "rate_source": rate_source,
        "rate_measured_over_bytes": measured_over_bytes,
        "seconds": rate.map(|rate| answer.download.seconds_at(rate)),
        "how": answer.how(),
        "transfer": snapshot.transfer,
        "as_of_unix_s": snapshot.as_of_unix_s,
        "offline_reason": snapshot.offline_reason,
    })
}

/// An object of another view with the answer beside, where there is one.
pub(crate) fn with_download(mut view: Value, answer: Option<&DownloadAnswer>) -> Value {
    if let (Some(answer), Some(view)) = (answer, view.as_object_mut()) {
        view.insert("download".to_owned(), download_json(answer));
    }
    view
}

/// A length of time with as many digits as it deserves.
pub(super) fn duration(seconds: f64) -> String {
    const MINUTE: f64 = 60.0;
    const HOUR: f64 = 3600.0;
    const DAY: f64 = 86400.0;
    if seconds < 1.5 * MINUTE {
        format!("{:.0} s", seconds.ceil())
    } else if seconds < 1.5 * HOUR {
        format!("{:.0} min", seconds / MINUTE)
    } else if seconds < 2.0 * DAY {
        format!("{:.1} h", seconds / HOUR)
    } else {
        format!("{:.1} days", seconds / DAY)
    }
}

/// A time as a date, `2026-11-30 08:00 UTC`.
pub(crate) fn date(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86400, unix_s % 86400);
    // Years begin in March here, so that the leap day is the last: the usual arithmetic of the
    // proleptic Gregorian calendar in eras of 400 years (H. Hinnant, "chrono-compatible low-level
    // date algorithms").
    let shifted = days.saturating_add(719_468);
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", second / 3600, second / 60 % 60)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tierkeep_doctor::Fact;
    use tierkeep_hub::{Download, MeasuredRate, Rate, Transfer};

    use super::*;
    use crate::commands::model::SnapshotFacts;
    use crate::render::testing::snapshot;

    fn answer() -> DownloadAnswer {
        let part = |n_files, bytes| Part { n_files, bytes, n_unknown: 0 };
        DownloadAnswer {
            snapshot: SnapshotFacts {
                name: "hf:zai-org/GLM-5.2-FP8@0123456789abcdef0123456789abcdef01234567".to_owned(),
                page: "https://huggingface.co/zai-org/GLM-5.2-FP8".to_owned(),
                repo: Some("zai-org/GLM-5.2-FP8".to_owned()),
                commit: Some("0123456789abcdef0123456789abcdef01234567".to_owned()),
                transfer: Transfer {
                    bytes: 15_900_000,
                    head_bytes: 15_363_472,
                    n_requests: 212,
                    n_cached: 0,
                    n_fetched: 153,
                },
                as_of_unix_s: None,
                offline_reason: None,
            },
            download: Download {
                all: part(162, 757_230_000_000),
                needed: part(159, 757_213_000_000),
                present: part(0, 0),
                is_listing_complete: true,
            },
            target: PathBuf::from("/home/me/.cache/huggingface/hub"),
            free_bytes: Fact::read(500_000_000_000, "statvfs"),
            rate: DownloadRate::NotMeasured,
        }
    }

    #[test]
    fn a_model_before_its_download() {
        snapshot("download", |style| {
            let short = answer();
            let mut enough = answer();
            enough.free_bytes = Fact::read(2_000_000_000_000, "statvfs");
            enough.download.present = Part { n_files: 3, bytes: 15_000_000_000, n_unknown: 0 };
            let rate = Rate { bytes_per_s: 12_300_000.0 };
            enough.rate = DownloadRate::Measured(MeasuredRate {
                rate,
                bytes: 15_500_000,
                at_unix_s: 1_796_025_600,
            });
            let mut offline = answer();
            offline.free_bytes = Fact::unknown("the folder cannot be read");
            offline.rate = DownloadRate::Given(Rate { bytes_per_s: 1.25e8 });
            offline.snapshot.as_of_unix_s = Some(1_796_025_600);
            offline.snapshot.offline_reason = Some("HF_HUB_OFFLINE is set".to_owned());
            [short, enough, offline].iter().map(|a| download(a, style)).collect()
        });
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix_s, expected) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (1_709_251_200, "2024-03-01 00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(unix_s), expected);
        }
        let _ = date(u64::MAX);
    }

    #[test]
    fn times_have_the_unit_that_they_deserve() {
        for (seconds, expected) in
            [(0.2, "1 s"), (89.0, "89 s"), (600.0, "10 min"), (7200.0, "2.0 h"), (1e6, "11.6 days")]
        {
            assert_eq!(duration(seconds), expected);
        }
    }
}
