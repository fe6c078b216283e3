//! The operating system and what it runs in.
//!
//! Owns the signs by which containers, virtual machines and WSL are told. Refuses to start programs
//! to find out.

use crate::fact::Fact;
use crate::facts::PlatformFacts;
use crate::parse;
use crate::tree::Tree;

const NONE: &str = "none";

/// Platform facts.
pub(crate) fn probe(tree: &Tree) -> PlatformFacts {
    if !cfg!(target_os = "linux") {
        let unknown = || Fact::unknown(crate::NOT_SUPPORTED);
        return PlatformFacts {
            os: Fact::read(std::env::consts::OS.to_owned(), "as built"),
            kernel: unknown(),
            container: unknown(),
            virtual_machine: unknown(),
            wsl: Fact::unknown(crate::NOT_SUPPORTED),
        };
    }
    const RELEASE: &str = "/proc/sys/kernel/osrelease";
    let kernel = Fact::from_read(tree.read_value(RELEASE), RELEASE);
    let wsl = kernel.clone().map(|release| {
        let release = release.to_ascii_lowercase();
        release.contains("microsoft") || release.contains("wsl")
    });
    PlatformFacts {
        os: os(tree),
        kernel,
        container: container(tree),
        virtual_machine: vm(tree),
        wsl,
    }
}

fn os(tree: &Tree) -> Fact<String> {
    for file in ["/etc/os-release", "/usr/lib/os-release"] {
        let Ok(text) = tree.read(file) else { continue };
        let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        let name = name.map(|name| name.trim().trim_matches(['"', '\'']));
        if let Some(name) = name.filter(|name| !name.is_empty()) {
            return Fact::read(name.to_owned(), file);
        }
    }
    Fact::read(std::env::consts::OS.to_owned(), "as built; /etc/os-release does not name it")
}

fn container(tree: &Tree) -> Fact<String> {
    let found = |name: &str, by: &str| Fact::read(name.to_owned(), by);
    let secrets = "/var/run/secrets/kubernetes.io";
    let groups = tree.read("/proc/self/cgroup");
    let names = |word: &str| groups.as_ref().is_ok_and(|text| text.contains(word));
    if tree.exists(secrets) {
        return found("kubernetes", secrets);
    }
    for (word, name) in [("/kubepods", "kubernetes"), ("/docker", "docker"), ("/lxc", "lxc")] {
        if names(word) {
            return found(name, "/proc/self/cgroup");
        }
    }
    for (file, name) in [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")] {
        if tree.exists(file) {
            return found(name, file);
        }
    }
    // systemd writes the manager's word here: lxc, systemd-nspawn, docker, podman, wsl ...
    const MANAGER: &str = "/run/systemd/container";
    match tree.read_value(MANAGER) {
        Ok(name) if !name.is_empty() => return found(&name, MANAGER),
        Ok(_) | Err(_) => {}
    }
    match groups {
        Ok(_) => found(NONE, "none of the usual files and control groups"),
        Err(error) => Fact::unknown(error.to_string()),
    }
}

fn vm(tree: &Tree) -> Fact<String> {
    let info = tree.read("/proc/cpuinfo").map(|text| parse::parse_cpuinfo(&text));
    let has_flag =
        info.as_ref().is_ok_and(|info| info.flags.iter().any(|flag| flag == "hypervisor"));
    let read = |file: &str| tree.read_value(file).ok().filter(|text| !text.is_empty());
    if let Some(kind) = read("/sys/hypervisor/type") {
        return Fact::read(kind, "/sys/hypervisor/type");
    }
    let vendor = read("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let product = read("/sys/class/dmi/id/product_name").unwrap_or_default();
    // Words of firmware tables that only virtual machines carry.
    const WORDS: &[(&str, &str)] = &[
        ("QEMU", "QEMU"),
        ("KVM", "KVM"),
        ("VMware", "VMware"),
        ("VirtualBox", "VirtualBox"),
        ("innotek", "VirtualBox"),
        ("Xen", "Xen"),
        ("Virtual Machine", "Hyper-V"),
        ("Parallels", "Parallels"),
        ("Amazon EC2", "Amazon EC2"),
        ("Google Compute Engine", "Google Compute Engine"),
        ("OpenStack", "OpenStack"),
        ("BHYVE", "bhyve"),
        ("Apple Virtualization", "Apple Virtualization"),
    ];
    let firmware = format!("{vendor} {product}");
    let word = WORDS.iter().find(|(word, _)| firmware.contains(word));
    match (word, has_flag, info) {
        // Bare-metal instances carry the provider's name too; on x86 the flag tells them apart.
        (Some((_, name)), true, _) => {
            Fact::read((*name).to_owned(), "/sys/class/dmi/id and the hypervisor flag")
        }
        (Some((_, name)), false, _) if cfg!(not(target_arch = "x86_64")) => {
            Fact::read((*name).to_owned(), "/sys/class/dmi/id")
        }
        (_, true, _) => Fact::read("unnamed".to_owned(), "hypervisor flag of /proc/cpuinfo"),
        (_, false, Ok(info)) if !info.flags.is_empty() && cfg!(target_arch = "x86_64") => {
            Fact::read(NONE.to_owned(), "no hypervisor flag in /proc/cpuinfo")
        }
        (_, false, Ok(_)) => Fact::unknown("neither /proc/cpuinfo nor firmware tables tell"),
        (_, false, Err(error)) => Fact::unknown(error.to_string()),
    }
}
