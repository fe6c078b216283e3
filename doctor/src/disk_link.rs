//! How a disk is attached.
//!
//! Owns the way from a mount to its block device and from there up the tree of devices. Refuses to tell
//! a link from a device's name where the tree says otherwise.

use std::path::{Path, PathBuf};

use crate::fact::Fact;
use crate::parse::{self, Mount};
use crate::tree::Tree;

/// Devices made of devices are followed this far: encryption on volumes on arrays on partitions.
const MAX_LAYERS: usize = 8;

/// A disk's place in the tree of devices.
pub(crate) struct BlockDevice {
    /// Its folder on disk; a partition's own, not that of the whole.
    folder: PathBuf,
}

/// How a disk is attached.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attachment {
    /// In words, such as `PCIe 4.0 x4`.
    pub(crate) text: String,
    /// Whether it is made up by a hypervisor, so that what the device says of itself tells nothing.
    pub(crate) is_virtual: bool,
    /// What the link carries, where that is known and one link is all that there is.
    pub(crate) bytes_per_s: Option<f64>,
    detail: String,
}

impl Attachment {
    pub(crate) fn fact(&self) -> Fact<String> {
        Fact::read(self.text.clone(), self.detail.clone())
    }
}

/// The block device of a mount.
pub(crate) fn block_device(tree: &Tree, mount: &Mount) -> Result<BlockDevice, String> {
    let (major, minor) = mount.device_number;
    let by_number = format!("/sys/dev/block/{major}:{minor}");
    // Filesystems that span devices have a number of their own; their first device has a name.
    let name = Path::new(&mount.source).file_name().map(|name| name.to_string_lossy().into_owned());
    let by_name = name
        .filter(|_| mount.source.starts_with("/dev/"))
        .map(|name| format!("/sys/class/block/{name}"));
    let found = std::iter::once(by_number.clone())
        .chain(by_name)
        .find_map(|folder| tree.path(folder).canonicalize().ok());
    match found {
        Some(folder) => Ok(BlockDevice { folder }),
        None => Err(format!(
            "{} on {} is no block device in {by_number}",
            mount.filesystem, mount.source
        )),
    }
}

impl BlockDevice {
    /// Whether it says that it rotates.
    pub(crate) fn rotational(&self, tree: &Tree) -> Fact<bool> {
        // A partition has no queue of its own; its disk is the folder above.
        for holder in [Some(self.folder.as_path()), self.folder.parent()].into_iter().flatten() {
            let file = tree.logical(&holder.join("queue/rotational"));
            if let Ok(text) = tree.read_value(&file) {
                let detail = format!("{}, as the device reports", file.display());
                return match text.as_str() {
                    "0" => Fact::read(false, detail),
                    "1" => Fact::read(true, detail),
                    other => {
                        Fact::unknown(format!("{}: expected 0 or 1, found {other}", file.display()))
                    }
                };
            }
        }
        Fact::unknown(format!("{} has no queue/rotational", tree.logical(&self.folder).display()))
    }

    /// How it is attached; devices made of others, by the first of them.
    pub(crate) fn attachment(&self, tree: &Tree) -> Result<Attachment, String> {
        let mut folder = self.folder.clone();
        let mut layers: Vec<String> = Vec::new();
        let mut is_one = true;
        for _ in 0..MAX_LAYERS {
            let logical = tree.logical(&folder);
            let parts = tree.list(logical.join("slaves")).unwrap_or_default();
            let Some(first) = parts.first() else {
                return Ok(on_top(&layers, is_one, direct(tree, &folder)?));
            };
            is_one &= parts.len() == 1;
            let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
            layers.push(match parts.len() {
                1 => name.unwrap_or_default(),
                count => format!("{} of {count}", name.unwrap_or_default()),
            });
            folder = folder
                .join("slaves")
                .join(first)
                .canonicalize()
                .map_err(|error| format!("cannot follow {}: {error}", logical.display()))?;
        }
        Err("made of too many layers of devices".to_owned())
    }
}

/// An attachment seen through layers. Several devices carry more than one link does.
fn on_top(layers: &[String], is_one: bool, below: Attachment) -> Attachment {
    if layers.is_empty() {
        return below;
    }
    Attachment {
        text: format!("{} over {}", layers.join(" over "), below.text),
        is_virtual: below.is_virtual,
        bytes_per_s: below.bytes_per_s.filter(|_| is_one),
        detail: below.detail,
    }
}

/// The attachment of a device that is made of no others.
fn direct(tree: &Tree, folder: &Path) -> Result<Attachment, String> {
    let logical = tree.logical(folder);
    let path = logical.display().to_string();
    let is_below =
        |word: &str| path.split('/').any(|part| part.to_ascii_lowercase().starts_with(word));
    let plain = |text: &str| Attachment {
        text: text.to_owned(),
        is_virtual: text.starts_with("virtual"),
        bytes_per_s: None,
        detail: path.clone(),
    };
    if is_below("virtio") {
        return Ok(plain("virtual (virtio)"));
    }
    if is_below("vbd-") || is_below("xen") {
        return Ok(plain("virtual (Xen)"));
    }
    if is_below("vmbus") {
        return Ok(plain("virtual (Hyper-V)"));
    }
    if is_below("nvme-fabrics") {
        return Ok(plain("NVMe over a network"));
    }
    if is_below("nvme") {
        return Ok(pcie(tree, folder).unwrap_or_else(|| plain("NVMe")));
    }
    for (word, text) in [
        ("usb", "USB"),
        ("mmc", "MMC"),
        ("ata", "SATA"),
        ("host", "SCSI"),
        ("zram", "memory (zram)"),
        ("ram", "memory"),
        ("loop", "a file (loop)"),
    ] {
        if is_below(word) {
            return Ok(plain(text));
        }
    }
    Err(format!("{path} does not tell"))
}

/// The link of the nearest PCI device above.
fn pcie(tree: &Tree, folder: &Path) -> Option<Attachment> {
    folder.ancestors().skip(1).find_map(|ancestor| {
        let logical = tree.logical(ancestor);
        let read = |file: &str| tree.read_value(logical.join(file)).ok();
        let generation = parse::parse_link_generation(&read("current_link_speed")?)?;
        let width = parse::parse_link_width(&read("current_link_width")?)?;
        Some(Attachment {
            text: format!("PCIe {generation}.0 x{width}"),
            is_virtual: false,
            bytes_per_s: parse::link_bytes_per_s(generation, width),
            detail: format!("current_link_speed and width of {}", logical.display()),
        })
    })
}
