//! What sysfs says of PCI Express links.
//!
//! Owns the rates of the generations. Refuses to round an unfamiliar speed to a familiar one.

/// Reads `current_link_speed` or `max_link_speed` (`16.0 GT/s PCIe`) as a generation. `None` for
/// `Unknown` and for speeds that no generation has.
pub fn parse_link_generation(text: &str) -> Option<u32> {
    let mut words = text.split_whitespace();
    let (speed, unit) = (words.next()?, words.next()?);
    if unit != "GT/s" {
        return None;
    }
    match speed {
        "2.5" | "2" => Some(1),
        "5" | "5.0" => Some(2),
        "8" | "8.0" => Some(3),
        "16" | "16.0" => Some(4),
        "32" | "32.0" => Some(5),
        "64" | "64.0" => Some(6),
        _ => None,
    }
}

/// Reads `current_link_width` or `max_link_width`. 0 stands for no link, and no link is wider than 32.
pub fn parse_link_width(text: &str) -> Option<u32> {
    text.trim().parse().ok().filter(|width| (1..=32).contains(width))
}

/// Bytes per second that a link carries one way, before the headers of packets.
///
/// Transfers of one bit a lane, less the encoding: 8 of 10 bits in generations 1 and 2, 128 of 130 in
/// 3 to 5, 242 of 256 bytes in 6 (PCI Express Base Specification 6.0, section 4.2).
pub fn link_bytes_per_s(generation: u32, width: u32) -> Option<f64> {
    let lane = match generation {
        1 => 2.5e9 / 8.0 * (8.0 / 10.0),
        2 => 5e9 / 8.0 * (8.0 / 10.0),
        3 => 8e9 / 8.0 * (128.0 / 130.0),
        4 => 16e9 / 8.0 * (128.0 / 130.0),
        5 => 32e9 / 8.0 * (128.0 / 130.0),
        6 => 64e9 / 8.0 * (242.0 / 256.0),
        _ => return None,
    };
    Some((lane * f64::from(width)).round())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links() {
        assert_eq!(parse_link_generation("16.0 GT/s PCIe\n"), Some(4));
        assert_eq!(parse_link_generation("2.5 GT/s"), Some(1));
        for text in ["Unknown", "Unknown speed", "", "16.0", "10.0 GT/s PCIe", "16.0 Gb/s"] {
            assert_eq!(parse_link_generation(text), None, "{text:?}");
        }
        assert_eq!(parse_link_width("16\n"), Some(16));
        for text in ["0", "255", "x", ""] {
            assert_eq!(parse_link_width(text), None, "{text:?}");
        }
    }

    #[test]
    fn rates_are_those_of_the_specification() {
        // 15.75 and 31.5 GB/s, as commonly rounded.
        assert_eq!(link_bytes_per_s(3, 16), Some(15_753_846_154.0));
        assert_eq!(link_bytes_per_s(4, 16), Some(31_507_692_308.0));
        assert_eq!(link_bytes_per_s(1, 1), Some(250e6));
        assert_eq!(link_bytes_per_s(6, 16), Some(121e9));
        assert_eq!(link_bytes_per_s(9, 16), None);
    }
}
