//! `/proc/cpuinfo` and the lists and sizes of `/sys/devices/system/cpu`.
//!
//! Refuses CPU numbers beyond any machine, so that a list cannot ask for unbounded memory.

use super::{ParseError, excerpt};

/// Highest CPU number that is believed. Linux is built for at most 8,192.
const MAX_CPU: usize = 65_535;

/// `/proc/cpuinfo`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuInfo {
    /// The first name given to a processor.
    pub model_name: Option<String>,
    /// One entry per hardware thread.
    pub processors: Vec<Processor>,
    /// Flags (x86) or features (Arm) of the first processor that lists any.
    pub flags: Vec<String>,
}

/// One hardware thread in `/proc/cpuinfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    /// Its CPU number.
    pub id: usize,
    /// `physical id`, absent on Arm and some virtual machines.
    pub package: Option<u64>,
    /// `core id`, absent on Arm and some virtual machines.
    pub core: Option<u64>,
}

/// Reads `/proc/cpuinfo`.
pub fn parse_cpuinfo(text: &str) -> CpuInfo {
    let mut info = CpuInfo::default();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match name.trim() {
            "processor" => {
                // Old Arm kernels also have a line "Processor", in capitals, that names the model.
                if let Ok(id) = value.parse() {
                    info.processors.push(Processor { id, package: None, core: None });
                }
            }
            "physical id" => {
                if let Some(last) = info.processors.last_mut() {
                    last.package = value.parse().ok();
                }
            }
            "core id" => {
                if let Some(last) = info.processors.last_mut() {
                    last.core = value.parse().ok();
                }
            }
            "model name" | "cpu model" | "Processor" | "Model" | "Hardware"
                if info.model_name.is_none() && !value.is_empty() =>
            {
                info.model_name = Some(value.to_owned());
            }
            "flags" | "Features" if info.flags.is_empty() => {
                info.flags = value.split_whitespace().map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    info
}

/// Reads a list of CPUs such as `0-3,8`, sorted and without repetitions.
///
/// # Errors
///
/// Anything else, a range that runs backwards, or a CPU number beyond 65,535.
pub fn parse_cpu_list(text: &str) -> Result<Vec<usize>, ParseError> {
    let wrong = || ParseError::NotACpuList { found: excerpt(text) };
    let mut present = vec![false; MAX_CPU + 1];
    for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.parse().map_err(|_| wrong())?;
        let last: usize = last.parse().map_err(|_| wrong())?;
        if last > MAX_CPU {
            return Err(ParseError::CpuOutOfRange { found: last, limit: MAX_CPU });
        }
        present.get_mut(first..=last).ok_or_else(wrong)?.fill(true);
    }
    Ok(present.iter().enumerate().filter_map(|(cpu, is_in)| is_in.then_some(cpu)).collect())
}

/// Writes CPU numbers as a list such as `0-3,8`, in ascending order; [`parse_cpu_list`] reads it back.
pub fn format_cpu_list(cpus: &[usize]) -> String {
    let mut cpus = cpus.to_vec();
    cpus.sort_unstable();
    cpus.dedup();
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
            Some(_) | None => ranges.push((cpu, cpu)),
        }
    }
    let range = |(first, last): (usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(",")
}

/// Reads the size of a cache such as `266240K` in bytes.
///
/// # Errors
///
/// Anything that is not a number followed by `K`, `M`, `G` or nothing.
pub fn parse_cache_size(text: &str) -> Result<u64, ParseError> {
    let wrong = || ParseError::NotANumber { what: "cache size", found: excerpt(text) };
    let text = text.trim();
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let unit: u64 = match text.get(digits.len()..) {
        Some("") => 1,
        Some("K") => 1 << 10,
        Some("M") => 1 << 20,
        Some("G") => 1 << 30,
        Some(_) | None => return Err(wrong()),
    };
    digits.parse::<u64>().ok().and_then(|size| size.checked_mul(unit)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        for (text, expected) in
            [("0-3,8\n", vec![0, 1, 2, 3, 8]), ("5", vec![5]), ("", vec![]), ("2,1-2", vec![1, 2])]
        {
            assert_eq!(parse_cpu_list(text).unwrap(), expected, "{text:?}");
        }
        for text in ["3-1", "x", "1-", "-1", "0-18446744073709551615", "99999999"] {
            assert!(parse_cpu_list(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn lists_are_written_short() {
        assert_eq!(format_cpu_list(&[8, 0, 1, 2, 3, 3]), "0-3,8");
        assert_eq!(format_cpu_list(&[]), "");
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_cache_size("266240K\n"), Ok(266_240 << 10));
        assert_eq!(parse_cache_size("32M"), Ok(32 << 20));
        assert!(parse_cache_size("KK").is_err());
        assert!(parse_cache_size("18446744073709551615G").is_err());
    }

    #[test]
    fn cpuinfo_of_two_threads_on_one_core() {
        let info = parse_cpuinfo(
            "processor\t: 0\nmodel name\t: A\nphysical id\t: 0\ncore id\t: 3\nflags\t: fpu avx2\n\n\
             processor\t: 1\nmodel name\t: B\nphysical id\t: 0\ncore id\t: 3\nflags\t: fpu\n",
        );
        assert_eq!(info.model_name.as_deref(), Some("A"));
        assert_eq!(info.flags, ["fpu", "avx2"]);
        assert_eq!(info.processors.len(), 2);
        assert_eq!(info.processors[1], Processor { id: 1, package: Some(0), core: Some(3) });
    }
}
