//! Writing a file whole or not at all. Owns what may be replaced by a rename, and what may not:
//! devices, pipes and what a link names are written to, never put out of the way.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes `text` to `path`: to a neighbour first, then renamed, so that a reader sees the old file or
/// the new one. A link is followed and stays a link; the permissions of a replaced file stay.
///
/// A device, a pipe or anything under `/dev` and `/proc` is opened and written to instead: a rename
/// would replace `/dev/stdout` by a file.
///
/// # Errors
/// What the system says; the old file is then untouched, unless it is no regular file.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let is_special = ["/dev", "/proc"].iter().any(|special| path.starts_with(special));
    if metadata.as_ref().is_some_and(|m| is_special || !m.is_file()) {
        return OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes());
    }
    let target = followed(path)?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let neighbour = target.with_file_name(format!("{name}.tmp-{}", std::process::id()));
    let written = fs::write(&neighbour, text)
        .and_then(|()| match &metadata {
            Some(old) => fs::set_permissions(&neighbour, old.permissions()),
            None => Ok(()),
        })
        .and_then(|()| fs::rename(&neighbour, &target));
    if written.is_err() {
        let _ = fs::remove_file(&neighbour);
    }
    written
}

/// Whether [`write()`] has a chance: what takes long to make should not be lost to a misspelt folder.
/// Creates nothing.
///
/// # Errors
/// `path` is a folder, or the folder that it would lie in is not there.
pub fn check(path: &Path) -> io::Result<()> {
    let target = followed(path)?;
    if target.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => fs::metadata(folder).and_then(|m| {
            if m.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
        }),
        _ => Ok(()),
    }
}

/// Where a link leads, even if nothing is there yet; any other path as it is.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_owned();
    // As many as Linux follows.
    for _ in 0..40 {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_and_replaced_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.toml");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let cases = [
            (folder.path().to_owned(), "a folder is no file"),
            (folder.path().join("none/plan.toml"), "no such folder"),
            (path.join("plan.toml"), "a file is no folder"),
        ];
        for (path, why) in cases {
            assert!(check(&path).is_err(), "{why}");
            assert!(write(&path, "x").is_err(), "{why}");
        }
        check(&path).unwrap();
        check(&folder.path().join("new.toml")).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_links_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (link, file) = (folder.path().join("link"), folder.path().join("file"));
        symlink("file", &link).unwrap();
        write(&link, "through a link that led nowhere").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        write(&link, "through a link").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "through a link");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        symlink(&a, &b).unwrap();
        symlink(&b, &a).unwrap();
        assert!(write(&a, "x").is_err(), "a circle of links");
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_written_to_and_stays() {
        use std::os::unix::fs::FileTypeExt;
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let read = {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs::read_to_string(pipe).unwrap())
        };
        write(&pipe, "plan").unwrap();
        assert_eq!(read.join().unwrap(), "plan");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    }
}
