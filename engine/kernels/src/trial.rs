//! Executes one instruction of each instruction set and checks what it computes.
//!
//! Owns: the instructions tried, and the request to the kernel that AMX needs. Refuses to decide what
//! is tried or to survive: a processor flag that lies ends the process with an illegal instruction, so
//! the caller runs this in a child process. Hypervisors advertise what faults, and faults are all that
//! proves it.
#![expect(unsafe_code, reason = "instructions are executed that the compiler does not choose")]

/// What an instruction did. A third outcome is that the process is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It computed what it should.
    Right,
    /// It computed something else.
    Wrong,
    /// The operating system does not let this process use the registers that it needs.
    Refused,
}

impl Outcome {
    /// The word that stands for it between processes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::Wrong => "wrong",
            Self::Refused => "refused",
        }
    }
}

/// Makes ready for a process that may die: no memory dump is written when it does.
pub fn prepare() {
    #[cfg(target_os = "linux")]
    {
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        // Where it is refused, a dump may be written; that costs disk space alone.
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    }
}

/// Executes an instruction of a set, named as by Rust (`avx512vnni`); `None` for a set that this
/// build does not know. **Ends the process where the processor lacks the set.**
#[must_use]
pub fn run(set: &str) -> Option<Outcome> {
    arch::run(set)
}

fn outcome(is_right: bool) -> Outcome {
    if is_right { Outcome::Right } else { Outcome::Wrong }
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::asm;

    use super::{Outcome, outcome};

    /// 64 bytes as sixteen 32-bit lanes, on a cache line of their own.
    #[repr(align(64))]
    #[derive(Clone, Copy, PartialEq)]
    struct Lanes([u32; 16]);

    fn all(value: u32) -> Lanes {
        Lanes([value; 16])
    }

    /// Executes `acc = op(acc, a, b)` on registers 0, 1 and 2 of a width, and compares the lanes that
    /// they hold with what every lane should be.
    macro_rules! vectors {
        ($load:literal, $register:literal, $lanes:literal, $op:literal, $acc:expr, $a:expr, $b:expr, $expected:expr) => {{
            let (mut acc, a, b): (Lanes, Lanes, Lanes) = (all($acc), all($a), all($b));
            // SAFETY: reads 64 bytes at most of each operand and writes as many to `acc`, all of
            // which are 64 bytes long; the registers written are declared. Should the processor not
            // know the instruction, the process ends, which the caller has prepared for.
            unsafe {
                asm!(
                    concat!($load, " ", $register, "0, [{acc}]"),
                    concat!($load, " ", $register, "1, [{a}]"),
                    concat!($load, " ", $register, "2, [{b}]"),
                    $op,
                    concat!($load, " [{acc}], ", $register, "0"),
                    acc = in(reg) &mut acc,
                    a = in(reg) &a,
                    b = in(reg) &b,
                    out("xmm0") _,
                    out("xmm1") _,
                    out("xmm2") _,
                    options(nostack),
                );
                if $register != "xmm" {
                    // Otherwise every later instruction of the old encoding would be slow.
                    asm!("vzeroupper", out("xmm0") _, options(nostack, nomem));
                }
            }
            outcome(acc.0[..$lanes].iter().all(|lane| *lane == $expected))
        }};
    }

    pub(super) fn run(set: &str) -> Option<Outcome> {
        let float = f32::to_bits;
        // Four bytes of 2 times four bytes of 3 give 24, added to 1.
        let (twos, threes) = (0x0202_0202, 0x0303_0303);
        Some(match set {
            "sse4.1" => vectors!("movdqa", "xmm", 4, "pmulld xmm0, xmm1", 3, 5, 0, 15),
            "avx2" => vectors!("vmovdqa", "ymm", 8, "vpmulld ymm0, ymm1, ymm2", 0, 3, 5, 15),
            "fma" => vectors!(
                "vmovdqa",
                "ymm",
                8,
                "vfmadd231ps ymm0, ymm1, ymm2",
                float(1.0),
                float(2.0),
                float(3.0),
                float(7.0)
            ),
            // Two halves of 1.0 in each lane.
            "f16c" => {
                vectors!("vmovdqa", "ymm", 8, "vcvtph2ps ymm0, xmm1", 0, 0x3c00_3c00, 0, float(1.0))
            }
            "avx512f" => {
                vectors!("vmovdqa32", "zmm", 16, "vpmulld zmm0, zmm1, zmm2", 0, 3, 5, 15)
            }
            "avx512bw" => {
                vectors!(
                    "vmovdqa32",
                    "zmm",
                    16,
                    "vpaddb zmm0, zmm1, zmm2",
                    0,
                    twos,
                    threes,
                    0x0505_0505
                )
            }
            // 64-bit lanes of 2^32 + 1, squared and cut to 64 bits: 2^33 + 1.
            "avx512dq" => {
                let (mut acc, a) = (all(0), all(1));
                // SAFETY: as in `vectors`.
                unsafe {
                    asm!(
                        "vmovdqa32 zmm1, [{a}]",
                        "vpmullq zmm0, zmm1, zmm1",
                        "vmovdqa32 [{acc}], zmm0",
                        "vzeroupper",
                        acc = in(reg) &mut acc,
                        a = in(reg) &a,
                        out("xmm0") _,
                        out("xmm1") _,
                        options(nostack),
                    );
                }
                outcome(acc.0.chunks(2).all(|lane| lane == [1, 2]))
            }
            // The exclusive or of three registers, which has no older encoding.
            "avx512vl" => {
                vectors!("vmovdqa", "ymm", 8, "vpternlogd ymm0, ymm1, ymm2, 0x96", 1, 2, 4, 7)
            }
            "avx512vnni" => {
                vectors!("vmovdqa32", "zmm", 16, "vpdpbusd zmm0, zmm1, zmm2", 1, twos, threes, 25)
            }
            // Pairs of 1.0 as bf16, added to 1.0 in f32.
            "avx512bf16" => vectors!(
                "vmovdqa32",
                "zmm",
                16,
                "vdpbf16ps zmm0, zmm1, zmm2",
                float(1.0),
                0x3f80_3f80,
                0x3f80_3f80,
                float(3.0)
            ),
            "avxvnni" => vectors!(
                "vmovdqa",
                "ymm",
                8,
                "{{vex}} vpdpbusd ymm0, ymm1, ymm2",
                1,
                twos,
                threes,
                25
            ),
            "amx-tile" => amx(None),
            "amx-int8" => amx(Some(Product::Int8)),
            "amx-bf16" => amx(Some(Product::Bf16)),
            _ => return None,
        })
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Product {
        Int8,
        Bf16,
    }

    /// Configures three tiles of 1 x 64 bytes (16 x 64 for the right factor), loads them, multiplies
    /// where asked to, and stores the first.
    fn amx(product: Option<Product>) -> Outcome {
        if !amx_is_permitted() {
            return Outcome::Refused;
        }
        // Palette 1; then the bytes of a row of tiles 0, 1, 2 from byte 16 on, as 16-bit numbers; and
        // their rows from byte 48 on (Intel's manual, volume 2, LDTILECFG).
        let mut config = [0_u8; 64];
        config[0] = 1;
        (config[16], config[18], config[20]) = (64, 64, 64);
        (config[48], config[49], config[50]) = (1, 1, 16);
        let config = AlignedConfig(config);
        // 64 products of 2 and 3 added to 1, or 32 products of 1.0 and 1.0 added to 1.0.
        let (start, a, b, expected) = match product {
            None => (7, 0, 0, 7),
            Some(Product::Int8) => (1, 0x0202_0202, 0x0303_0303, 1 + 64 * 6),
            Some(Product::Bf16) => (1_f32.to_bits(), 0x3f80_3f80, 0x3f80_3f80, 33_f32.to_bits()),
        };
        let (start, a, b) = (all(start), all(a), [all(b); 16]);
        let mut found = all(0);
        macro_rules! tiles {
            ($($op:literal)?) => {
                // SAFETY: tile 0 and 1 are one row of 64 bytes, as `start`, `a` and `found` are;
                // tile 2 has 16 rows of 64 bytes, as `b` does. The tiles are released before the
                // end. Should the processor not know an instruction, the process ends.
                unsafe {
                    asm!(
                        "ldtilecfg [{config}]",
                        "tileloadd tmm0, [{start} + {stride}]",
                        "tileloadd tmm1, [{a} + {stride}]",
                        "tileloadd tmm2, [{b} + {stride}]",
                        $($op,)?
                        "tilestored [{found} + {stride}], tmm0",
                        "tilerelease",
                        config = in(reg) config.0.as_ptr(),
                        start = in(reg) &start,
                        a = in(reg) &a,
                        b = in(reg) &b,
                        found = in(reg) &mut found,
                        stride = in(reg) 64_usize,
                        out("tmm0") _,
                        out("tmm1") _,
                        out("tmm2") _,
                        options(nostack),
                    )
                }
            };
        }
        match product {
            None => tiles!(),
            Some(Product::Int8) => tiles!("tdpbssd tmm0, tmm1, tmm2"),
            Some(Product::Bf16) => tiles!("tdpbf16ps tmm0, tmm1, tmm2"),
        }
        outcome(found == all(expected))
    }

    #[repr(align(64))]
    struct AlignedConfig([u8; 64]);

    /// Asks Linux for the tile registers: without its leave their first use is an illegal instruction.
    #[cfg(target_os = "linux")]
    fn amx_is_permitted() -> bool {
        const SYS_ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const XFEATURE_XTILEDATA: u64 = 18;
        let result: i64;
        // SAFETY: the call takes two numbers and touches no memory of this process; the registers
        // that the kernel overwrites are declared.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") SYS_ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }

    #[cfg(not(target_os = "linux"))]
    fn amx_is_permitted() -> bool {
        false
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use core::arch::asm;

    use super::{Outcome, outcome};

    /// Executes an instruction on vector registers 0 (sums), 1 and 2, given by its encoding, so that
    /// the assembler needs no leave for it.
    macro_rules! vectors {
        ($encoding:literal, $acc:expr, $a:expr, $b:expr, $expected:expr) => {{
            let mut acc = [$acc; 4];
            let (a, b): ([u32; 4], [u32; 4]) = ([$a; 4], [$b; 4]);
            // SAFETY: reads and writes 16 bytes of operands that have as many; the registers written
            // are declared. Should the processor not know the instruction, the process ends, which
            // the caller has prepared for.
            unsafe {
                asm!(
                    "ld1 {{v0.16b}}, [{acc}]",
                    "ld1 {{v1.16b}}, [{a}]",
                    "ld1 {{v2.16b}}, [{b}]",
                    concat!(".inst ", $encoding),
                    "st1 {{v0.16b}}, [{acc}]",
                    acc = in(reg) acc.as_mut_ptr(),
                    a = in(reg) a.as_ptr(),
                    b = in(reg) b.as_ptr(),
                    out("v0") _,
                    out("v1") _,
                    out("v2") _,
                    options(nostack),
                );
            }
            outcome(acc.iter().all(|lane: &u32| *lane == $expected))
        }};
    }

    pub(super) fn run(set: &str) -> Option<Outcome> {
        let (twos, threes) = (0x0202_0202, 0x0303_0303);
        Some(match set {
            // add v0.4s, v1.4s, v2.4s
            "neon" => vectors!("0x4ea28420", 0, 3, 5, 8),
            // sdot v0.4s, v1.16b, v2.16b: 1 + 4 * 2 * 3
            "dotprod" => vectors!("0x4e829420", 1, twos, threes, 25),
            // smmla v0.4s, v1.16b, v2.16b: 1 + 8 * 2 * 3
            "i8mm" => vectors!("0x4e82a420", 1, twos, threes, 49),
            _ => return None,
        })
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    pub(super) fn run(_set: &str) -> Option<super::Outcome> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_processor_has_computes_right() {
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! all {
                ($($set:tt)*) => { [$(($set, std::arch::is_x86_feature_detected!($set))),*] };
            }
            let sets = all!("sse4.1" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl"
                "avx512vnni" "avx512bf16" "avxvnni");
            // Only what is there: anything else would end the test's own process.
            for (set, is_there) in sets {
                if is_there {
                    assert_eq!(run(set), Some(Outcome::Right), "{set}");
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        assert_eq!(run("neon"), Some(Outcome::Right));
    }

    #[test]
    fn names_that_are_not_known_are_not_tried() {
        for set in ["", "avx", "AVX2", "amx", "avx512vp2intersect"] {
            assert_eq!(run(set), None, "{set}");
        }
    }
}
