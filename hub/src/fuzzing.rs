//! Doors to the parsers of what servers and users write, for fuzz targets only: each holds what its
//! callers rely on.

use crate::folder::index_names;
use crate::listing::Listing;
use crate::range::ContentRange;
use crate::rate::Rate;
use crate::reference::{Reference, parse_local, parse_remote};
use crate::url;

/// The hub's listing of a repository, and what of it comes back from the cache.
pub fn listing(bytes: &[u8]) {
    let Ok(listing) = Listing::parse(bytes) else { return };
    assert!(listing.commit.bytes().all(|b| b.is_ascii_hexdigit()));
    let _ = listing.other_formats();
    let kept = serde_json::to_vec(&listing).unwrap_or_default();
    assert_eq!(serde_json::from_slice::<Listing>(&kept).ok(), Some(listing));
}

/// An index: no name that it gives leads out of the folder.
pub fn index(bytes: &[u8]) {
    for name in index_names("http://host/index", bytes).unwrap_or_default() {
        assert!(!name.contains(['/', '\\']) && !name.starts_with('.'), "{name}");
    }
}

/// What a user writes for MODEL, and a rate. A repository's text parses to itself.
pub fn reference(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = text.parse::<Rate>();
    let _ = parse_local(&text);
    for prefix in ["", "hf:", "https://huggingface.co/"] {
        match parse_remote(&format!("{prefix}{text}")) {
            Ok(Some(Reference::Repo(repo))) => match parse_remote(&repo.to_string()) {
                Ok(Some(Reference::Repo(again))) => {
                    assert_eq!((again.repo, again.revision), (repo.repo, repo.revision));
                }
                other => unreachable!("{repo}: {other:?}"),
            },
            Ok(Some(Reference::Folder(folder))) => {
                assert!(!folder.to_string().contains('?'), "{folder}");
            }
            Ok(None) | Err(_) => {}
        }
    }
}

/// Headers of an answer, one a line: a Content-Range that is believed lies within its file.
pub fn answer(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let from = "https://host/a/b?c=d".parse().unwrap_or_default();
    for line in text.lines() {
        let _ = url::join(&from, line);
        let decoded = url::decode_path(line);
        assert_eq!(url::decode_path(&url::encode_path(&decoded)), decoded);
        let Some(range) = ContentRange::parse(line) else { continue };
        if let (Some((first, last)), Some(total)) = (range.span, range.total) {
            assert!(first <= last && last < total, "{line}");
        }
        let _ = range.answers(0, u64::MAX);
    }
}
