//! AMD's compute driver: the `properties` of its nodes, and the numbers by which it names places.

/// A property of `/sys/class/kfd/kfd/topology/nodes/*/properties`: lines of a name and a number.
pub fn parse_kfd_property(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| match line.split_once(' ') {
        Some((found, value)) if found == name => value.trim().parse().ok(),
        Some(_) | None => None,
    })
}

/// The `location_id` of a PCI address such as `0000:c1:00.0`: bus, device and function in 8, 5 and 3
/// bits, as the kernel puts them together.
pub fn parse_pci_location(address: &str) -> Option<u64> {
    let mut parts = address.split(':').skip(1);
    let (bus, rest) = (parts.next()?, parts.next()?);
    let (device, function) = rest.split_once('.')?;
    let number = |text: &str, below: u64| {
        u64::from_str_radix(text, 16).ok().filter(|&number| number < below)
    };
    Some(number(bus, 256)? << 8 | number(device, 32)? << 3 | number(function, 8)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_properties() {
        assert_eq!(parse_pci_location("0000:c1:00.0"), Some(0xc100));
        assert_eq!(parse_pci_location("0000:03:1f.6"), Some(0x03fe));
        for address in ["", "c1:00.0", "0000:c1:00", "0000:100:00.0", "0000:c1:20.0", "0:0:0.8"] {
            assert_eq!(parse_pci_location(address), None, "{address}");
        }
        let text = "cpu_cores_count 16\nsimd_count 24\nlocation_id 49408\n";
        assert_eq!(parse_kfd_property(text, "simd_count"), Some(24));
        assert_eq!(parse_kfd_property(text, "simd"), None);
    }
}
