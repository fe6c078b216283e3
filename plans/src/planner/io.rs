//! How experts are read: past the page cache where the machine's facts and the model's files speak for
//! it. Owns the choice and its reason.

use tierkeep_doctor::Facts;

use super::Options;
use crate::budget::{IoMode, direct_padding_share};
use crate::catalogue::{Catalogue, DIRECT_ALIGN};

/// Most that whole blocks may add to the slots: what they take is slots that others do not get.
const PADDING_SHARE: f64 = 0.02;

/// The mode and, in words, why.
pub(super) fn choose(model: &Catalogue, machine: &Facts, options: &Options) -> (IoMode, String) {
    let padding = direct_padding_share(model);
    let blocks = format!(
        "whole blocks of {DIRECT_ALIGN} bytes add {:.2} % to the slots (computed)",
        padding * 100.0
    );
    match (options.io, machine.disk.direct_reads.value()) {
        (Some(IoMode::Direct), _) => {
            (IoMode::Direct, format!("past the page cache: given with --io direct; {blocks}"))
        }
        (Some(io @ IoMode::Dropped), _) => (
            io,
            "through the page cache, pages dropped after each read: given with --io dropped"
                .to_owned(),
        ),
        (Some(io @ IoMode::Buffered), _) => (
            io,
            "through the page cache, which keeps what it likes: given with --io buffered"
                .to_owned(),
        ),
        (None, Some(true)) if padding <= PADDING_SHARE => (
            IoMode::Direct,
            format!("past the page cache: measured, this disk takes direct reads; {blocks}"),
        ),
        (None, known) => {
            let why = match known {
                Some(true) => format!("this disk takes direct reads, but {blocks}"),
                Some(false) => {
                    "this disk was measured through the page cache, for it takes no direct reads"
                        .to_owned()
                }
                None => "whether this disk takes direct reads is unknown (no measurement says so)"
                    .to_owned(),
            };
            (
                IoMode::Dropped,
                format!("through the page cache, pages dropped after each read: {why}"),
            )
        }
    }
}
