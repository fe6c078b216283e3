//! `/proc/<pid>/mountinfo`.
//!
//! Owns its escapes and its optional fields (proc_pid_mountinfo(5)). Skips lines that lack a field.

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Major and minor number of the device.
    pub device_number: (u32, u32),
    /// The directory of the filesystem that is mounted.
    pub root: String,
    /// Where it is mounted.
    pub mount_point: String,
    /// Type, such as `ext4` or `fuse.sshfs`.
    pub filesystem: String,
    /// What is mounted, such as `/dev/nvme0n1p2`.
    pub source: String,
    /// Options of the filesystem; for version 1 control groups these name the controllers.
    pub super_options: Vec<String>,
}

/// Reads `/proc/<pid>/mountinfo`, in its order: where two lines name one mount point, the later one
/// hides the earlier.
pub fn parse_mountinfo(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mount> {
    // 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(2);
    let (major, minor) = fields.next()?.split_once(':')?;
    let device_number = (major.parse().ok()?, minor.parse().ok()?);
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let mut fields = after.split(' ');
    let filesystem = unescape(fields.next()?);
    let source = unescape(fields.next()?);
    let super_options = fields.next().unwrap_or_default().split(',').map(str::to_owned).collect();
    Some(Mount { device_number, root, mount_point, filesystem, source, super_options })
}

/// Replaces `\040` and the like, which stand for bytes.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = |digit: u8| (b'0'..=b'7').contains(&digit).then(|| u32::from(digit - b'0'));
        let escaped = match (first, tail) {
            (b'\\', [a, b, c, ..]) => match (octal(*a), octal(*b), octal(*c)) {
                (Some(a), Some(b), Some(c)) => u8::try_from(a * 64 + b * 8 + c).ok(),
                _ => None,
            },
            _ => None,
        };
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_fields_and_escapes() {
        let mounts = parse_mountinfo(
            "36 35 98:0 /mnt1 /my\\040models rw,noatime master:1 shared:3 - ext3 /dev/root rw,a=b\n\
             35 25 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
             broken line\n",
        );
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].mount_point, "/my models");
        assert_eq!(mounts[0].device_number, (98, 0));
        assert_eq!(mounts[0].filesystem, "ext3");
        assert_eq!(mounts[1].root, "/docker/abc");
        assert_eq!(mounts[1].super_options, ["rw", "memory"]);
    }

    #[test]
    fn unfinished_escapes_stay() {
        assert_eq!(unescape("a\\04"), "a\\04");
        assert_eq!(unescape("\\777x"), "\\777x");
        assert_eq!(unescape("\\134\\"), "\\\\");
    }
}
