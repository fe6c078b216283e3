//! Exact conversions between f32 and narrower float types.
//!
//! Owns: single values, in integer arithmetic that compilers vectorise. Refuses: slices and
//! instruction sets, which are the business of `arch`.

/// IEEE binary16 to f32, exact for every value, subnormals included; NaNs become quiet as in the
/// hardware conversion.
#[inline]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff);
    // The f16 exponent and mantissa placed in an f32 are too small by 2^(127 - 15); the product by
    // this power of two is exact, and normalises subnormals on the way.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | quiet | sign)
}

/// bfloat16 to f32, exact.
#[inline]
pub(crate) fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// e4m3 to f32, exact for every value: sign, 4 bits of exponent with bias 7, 3 of mantissa, subnormals,
/// and NaN where all bits but the sign are set.
#[inline]
pub(crate) fn e4m3_to_f32(byte: u8) -> f32 {
    let sign = u32::from(byte & 0x80) << 24;
    let magnitude = u32::from(byte & 0x7f);
    // As for f16: too small by 2^(127 - 7), and the product is exact.
    let scaled = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    let not_a_number = if magnitude == 0x7f { 0x7fc0_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | not_a_number | sign)
}

/// The low nibble as e2m1, to f32.
#[inline]
pub(crate) fn e2m1_to_f32(nibble: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let sign = u32::from(nibble & 8) << 28;
    f32::from_bits(MAGNITUDES[usize::from(nibble & 7)].to_bits() | sign)
}

/// E8M0 to f32, exact: 2^(byte - 127), which is subnormal for 0, and NaN for 255.
#[inline]
pub(crate) fn e8m0_to_f32(byte: u8) -> f32 {
    f32::from_bits(match byte {
        0 => 0x0040_0000,
        255 => 0x7fc0_0000,
        exponent => u32::from(exponent) << 23,
    })
}

/// f32 to IEEE binary16, to nearest, ties to even; overflow gives infinity, NaN stays a quiet NaN.
#[inline]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | ((magnitude >> 13) & 0x3ff)
    } else if magnitude >= 0x4780_0000 {
        // 65536 and above, infinity included.
        0x7c00
    } else if magnitude >= 0x3880_0000 {
        // 2^-14 and above: normal in f16. A carry out of the mantissa raises the exponent, up to
        // infinity, which is what rounding asks for.
        let odd = (magnitude >> 13) & 1;
        (magnitude - (112 << 23) + 0xfff + odd) >> 13
    } else {
        // One unit in the last place of 0.5 is 2^-24, the unit of f16 subnormals: this sum rounds.
        (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5_f32.to_bits()
    };
    // At most 0x7fff by construction, so the truncation loses nothing.
    (sign | half) as u16
}

/// f32 to bfloat16, to nearest, ties to even; overflow gives infinity, NaN stays a quiet NaN.
#[inline]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_value_decodes_as_the_oracle_says() {
        for bits in 0..=u16::MAX {
            let f16 = half::f16::from_bits(bits);
            let bf16 = half::bf16::from_bits(bits);
            if f16.is_nan() {
                assert!(f16_to_f32(bits).is_nan());
            } else {
                assert_eq!(f16_to_f32(bits).to_bits(), f16.to_f32().to_bits(), "f16 {bits:#06x}");
            }
            if bf16.is_nan() {
                assert!(bf16_to_f32(bits).is_nan());
            } else {
                assert_eq!(bf16_to_f32(bits).to_bits(), bf16.to_f32().to_bits());
            }
        }
    }

    /// Against the definitions of the formats, in exact arithmetic.
    #[test]
    fn every_narrow_value_decodes_as_its_format_says() {
        for byte in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2_f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
            };
            let expected = if byte & 0x80 == 0 { magnitude } else { -magnitude };
            let found = e4m3_to_f32(byte);
            match byte & 0x7f {
                0x7f => assert!(found.is_nan(), "{byte:#04x}"),
                _ => assert_eq!(f64::from(found).to_bits(), expected.to_bits(), "{byte:#04x}"),
            }
            let power = f64::from(e8m0_to_f32(byte));
            match byte {
                255 => assert!(power.is_nan()),
                _ => assert_eq!(power, 2_f64.powi(i32::from(byte) - 127), "{byte}"),
            }
            let (exponent, mantissa) = (i32::from(byte >> 1 & 3), f64::from(byte & 1));
            let magnitude = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2_f64.powi(exponent - 1),
            };
            let expected = if byte & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(f64::from(e2m1_to_f32(byte)).to_bits(), expected.to_bits());
        }
        assert_eq!((e4m3_to_f32(0x7e), e4m3_to_f32(0x81)), (448.0, -0.001_953_125));
    }

    #[test]
    fn encoding_rounds_as_the_oracle_says() {
        // Every upper half with lower halves around the ties of both types.
        for high in 0..=u16::MAX {
            for low in [
                0, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001,
                0xf000, 0xffff,
            ] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                if value.is_nan() {
                    assert!(f16_to_f32(f32_to_f16(value)).is_nan());
                    assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
                } else {
                    assert_eq!(
                        f32_to_f16(value),
                        half::f16::from_f32(value).to_bits(),
                        "{value:e}"
                    );
                    assert_eq!(f32_to_bf16(value), half::bf16::from_f32(value).to_bits());
                }
            }
        }
    }
}
