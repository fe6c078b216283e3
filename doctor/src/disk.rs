//! The disk under a directory: filesystem, mount, device, space.
//!
//! Owns the mapping from a directory to its mount, and the table of filesystem kinds. Refuses to write
//! anything. The block device and its link are in `disk_link`, timing in `disk_read`.

use std::path::Path;

use crate::disk_link;
use crate::fact::Fact;
use crate::facts::{DiskFacts, FilesystemKind};
use crate::parse::{self, Mount};
use crate::tree::Tree;

/// Facts about the disk under `directory`, read speed apart, and what its link carries.
pub(crate) fn probe(tree: &Tree, directory: Option<&Path>) -> (DiskFacts, Option<f64>) {
    let Some(directory) = directory else {
        return (nothing_known("no directory was given"), None);
    };
    let on_disk = match tree.path(directory).canonicalize() {
        Ok(on_disk) => on_disk,
        Err(error) => {
            let reason = format!("cannot find {}: {error}", directory.display());
            return (nothing_known(&reason), None);
        }
    };
    let logical = tree.logical(&on_disk);
    let mount = mount_of(tree, &logical);
    let from_mount = |get: fn(&Mount) -> String| match &mount {
        Ok(mount) => Fact::read(get(mount), "/proc/self/mountinfo"),
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let (free_bytes, total_bytes) = space(&on_disk);
    let device = match &mount {
        Ok(mount) => disk_link::block_device(tree, mount),
        Err(reason) => Err(reason.clone()),
    };
    let attachment = match &device {
        Ok(device) => device.attachment(tree),
        Err(reason) => Err(reason.clone()),
    };
    let link_bytes_per_s = attachment.as_ref().ok().and_then(|found| found.bytes_per_s);
    let facts = DiskFacts {
        path: Fact::read(logical.display().to_string(), "the directory asked about"),
        filesystem: from_mount(|mount| mount.filesystem.clone()),
        kind: match &mount {
            Ok(mount) => Fact::read(
                filesystem_kind(&mount.filesystem),
                format!("{} mounted at {}", mount.filesystem, mount.mount_point),
            ),
            Err(reason) => Fact::unknown(reason.clone()),
        },
        mount_point: from_mount(|mount| mount.mount_point.clone()),
        device: from_mount(|mount| mount.source.clone()),
        free_bytes,
        total_bytes,
        rotational: match (&device, &attachment) {
            (Ok(_), Ok(attachment)) if attachment.is_virtual => {
                Fact::unknown("a virtual disk calls itself rotating whatever is behind it")
            }
            (Ok(device), _) => device.rotational(tree),
            (Err(reason), _) => Fact::unknown(reason.clone()),
        },
        link: match attachment {
            Ok(attachment) => attachment.fact(),
            Err(reason) => Fact::unknown(reason),
        },
        read: Fact::default(),
        reads: Fact::default(),
        direct_reads: Fact::default(),
    };
    (facts, link_bytes_per_s)
}

fn nothing_known(reason: &str) -> DiskFacts {
    DiskFacts {
        path: Fact::unknown(reason),
        filesystem: Fact::unknown(reason),
        kind: Fact::unknown(reason),
        mount_point: Fact::unknown(reason),
        device: Fact::unknown(reason),
        free_bytes: Fact::unknown(reason),
        total_bytes: Fact::unknown(reason),
        rotational: Fact::unknown(reason),
        link: Fact::unknown(reason),
        read: Fact::unknown(reason),
        reads: Fact::unknown(reason),
        direct_reads: Fact::unknown(reason),
    }
}

/// The mount that a path lies in: the longest mount point above it, the last of equals.
fn mount_of(tree: &Tree, path: &Path) -> Result<Mount, String> {
    let text = tree.read("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    parse::parse_mountinfo(&text)
        .into_iter()
        .filter(|mount| path.starts_with(&mount.mount_point))
        .max_by_key(|mount| Path::new(&mount.mount_point).components().count())
        .ok_or_else(|| format!("no mount in /proc/self/mountinfo holds {}", path.display()))
}

/// What kind of filesystem a type from the list of mounts is.
pub fn filesystem_kind(filesystem: &str) -> FilesystemKind {
    match filesystem {
        "ext2" | "ext3" | "ext4" | "xfs" | "btrfs" | "zfs" | "f2fs" | "bcachefs" | "jfs"
        | "reiserfs" | "nilfs2" | "vfat" | "msdos" | "exfat" | "ntfs" | "ntfs3" | "hfsplus"
        | "apfs" | "iso9660" | "udf" | "squashfs" | "erofs" => FilesystemKind::Local,
        "nfs" | "nfs4" | "cifs" | "smb2" | "smb3" | "smbfs" | "9p" | "virtiofs" | "vboxsf"
        | "vmhgfs" | "prl_fs" | "drvfs" | "ceph" | "lustre" | "gpfs" | "beegfs" | "afs"
        | "glusterfs" | "orangefs" | "ocfs2" | "gfs2" => FilesystemKind::Network,
        "tmpfs" | "ramfs" | "devtmpfs" | "hugetlbfs" => FilesystemKind::Memory,
        "overlay" | "overlayfs" | "aufs" | "unionfs" => FilesystemKind::Overlay,
        "fuse" | "fuseblk" => FilesystemKind::Fuse,
        other if other.starts_with("fuse.") => FilesystemKind::Fuse,
        _ => FilesystemKind::Unknown,
    }
}

/// Free and total bytes of the filesystem at a path.
#[cfg(target_os = "linux")]
fn space(on_disk: &Path) -> (Fact<u64>, Fact<u64>) {
    match rustix::fs::statvfs(on_disk) {
        Ok(stat) => {
            let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
            (
                Fact::read(bytes(stat.f_bavail), "statvfs"),
                Fact::read(bytes(stat.f_blocks), "statvfs"),
            )
        }
        Err(error) => {
            let reason = format!("statvfs: {error}");
            (Fact::unknown(reason.clone()), Fact::unknown(reason))
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn space(_on_disk: &Path) -> (Fact<u64>, Fact<u64>) {
    let unknown = || Fact::unknown(crate::NOT_SUPPORTED);
    (unknown(), unknown())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds() {
        for (filesystem, kind) in [
            ("ext4", FilesystemKind::Local),
            ("9p", FilesystemKind::Network),
            ("fuse.sshfs", FilesystemKind::Fuse),
            ("tmpfs", FilesystemKind::Memory),
            ("overlay", FilesystemKind::Overlay),
            ("surprisefs", FilesystemKind::Unknown),
        ] {
            assert_eq!(filesystem_kind(filesystem), kind, "{filesystem}");
        }
    }
}
