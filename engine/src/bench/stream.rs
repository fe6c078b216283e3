//! Token ids that a measurement runs on: made from a seed, or taken from what a user has. Owns how they
//! are drawn, so that two runs of one stream are of the same tokens.

/// Where tokens come from, each below the size of the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub enum Stream {
    /// Every id equally likely.
    Uniform {
        /// Where the generator begins.
        seed: u64,
    },
    /// The id of rank `r` (from 1) with a weight of `r^-skew`; which id has which rank is drawn from the
    /// seed.
    Zipf {
        /// The exponent; 0 is uniform.
        skew: f64,
        /// Where the generator begins.
        seed: u64,
    },
    /// These, over and over.
    Given {
        /// The ids, at least one.
        ids: Vec<u32>,
    },
}

/// SplitMix64 (Steele, Lea, Flood 2014): a step of the state, then a mix of it.
#[derive(Clone, Debug)]
struct Generator(u64);

impl Generator {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`: the high half of the product (Lemire 2019), whose bias is under `n / 2^64`.
    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// From 0 to 1, 1 excluded.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Stream {
    /// `count` tokens of repeat `round`, below `vocab_size`. Another round of a stream that is drawn has
    /// other tokens; of one that is given it goes on `round * count` tokens later.
    #[must_use]
    pub fn tokens(&self, round: u64, count: usize, vocab_size: usize) -> Vec<u32> {
        let vocab_size = vocab_size.max(1);
        match self {
            Self::Uniform { seed } => {
                let mut generator = generator(*seed, round);
                (0..count).map(|_| generator.below(vocab_size as u64) as u32).collect()
            }
            Self::Zipf { skew, seed } => zipf((*skew, *seed), round, count, vocab_size),
            Self::Given { ids } => {
                let len = ids.len().max(1);
                let first = (round as usize % len).wrapping_mul(count % len) % len;
                ids.iter().copied().cycle().skip(first).take(count).collect()
            }
        }
    }

    /// Whether it is made and not taken from somebody's text: only of such a stream can all experts be
    /// expected.
    #[must_use]
    pub fn is_synthetic(&self) -> bool {
        match self {
            Self::Uniform { .. } | Self::Zipf { .. } => true,
            Self::Given { .. } => false,
        }
    }

    /// How it is drawn, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Uniform { seed } => format!("uniformly random token ids, seed {seed}"),
            Self::Zipf { skew, seed } => {
                format!("token ids with weights of rank^-{skew}, seed {seed}")
            }
            Self::Given { ids } => format!("{} given token ids, over and over", ids.len()),
        }
    }
}

fn generator(seed: u64, round: u64) -> Generator {
    // A round begins far from where the one before it does.
    Generator(Generator(seed).next() ^ Generator(round.wrapping_mul(0xD1B5_4A32_D192_ED03)).next())
}

fn zipf((skew, seed): (f64, u64), round: u64, count: usize, vocab_size: usize) -> Vec<u32> {
    // Ranks belong to the seed alone: the same ids are frequent in every round.
    let mut of_rank: Vec<u32> = (0..vocab_size as u32).collect();
    let mut shuffler = Generator(seed);
    for at in (1..vocab_size).rev() {
        of_rank.swap(at, shuffler.below(at as u64 + 1) as usize);
    }
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=vocab_size)
        .map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        })
        .collect();
    let mut generator = generator(seed, round);
    (0..count)
        .map(|_| {
            let at = generator.unit() * sum;
            let rank = sums.partition_point(|&up_to| up_to <= at).min(vocab_size - 1);
            of_rank.get(rank).copied().unwrap_or(0)
        })
        .collect()
}

/// Why a recorded routing trace cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line}: {found:?} is no line of a trace: expected `token layer expert...`, all numbers"
)]
pub struct TraceError {
    /// The line, from 1.
    pub line: usize,
    /// What is there.
    pub found: String,
}

/// The token ids of a recorded routing trace.
///
/// A line is `token layer expert...`: the id of a token, a layer from 0, and the experts that it was given
/// there in descending weight. Lines of one token stand together with ascending layers; a layer that
/// does not ascend begins the next token. Blank lines and lines that begin with # are left out.
///
/// # Errors
/// [`TraceError`], with the first line that is none.
pub fn trace_tokens(text: &str) -> Result<Vec<u32>, TraceError> {
    let mut tokens = Vec::new();
    let mut last_layer = None;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || TraceError { line: at + 1, found: line.chars().take(60).collect() };
        let numbers: Vec<u32> = line
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map_err(|_| wrong())?;
        let [token, layer, _, ..] = numbers[..] else { return Err(wrong()) };
        if last_layer.is_none_or(|last| layer <= last) {
            tokens.push(token);
        } else if tokens.last() != Some(&token) {
            return Err(wrong());
        }
        last_layer = Some(layer);
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // First outputs for the state 0, from the reference implementation in C (S. Vigna, 2015).
        let mut generator = Generator(0);
        let first = [generator.next(), generator.next(), generator.next()];
        assert_eq!(first, [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]);
    }

    #[test]
    fn a_seed_and_a_round_say_all_tokens() {
        for stream in [Stream::Uniform { seed: 7 }, Stream::Zipf { skew: 1.0, seed: 7 }] {
            let tokens = stream.tokens(3, 500, 100);
            assert_eq!(tokens, stream.tokens(3, 500, 100));
            assert_ne!(tokens, stream.tokens(4, 500, 100));
            // A longer draw begins with a shorter one.
            assert_eq!(tokens[..50], stream.tokens(3, 50, 100)[..]);
            assert!(tokens.iter().all(|&id| id < 100));
            assert!(stream.is_synthetic());
        }
        let other = Stream::Uniform { seed: 8 };
        assert_ne!(other.tokens(3, 50, 100), Stream::Uniform { seed: 7 }.tokens(3, 50, 100));
    }

    #[test]
    fn skew_is_what_it_says() {
        let count = 40_000;
        let shares = |stream: Stream| {
            let mut counts = [0_u32; 4];
            for id in stream.tokens(0, count, 4) {
                counts[id as usize] += 1;
            }
            counts.sort_unstable();
            counts.map(|n| f64::from(n) / count as f64)
        };
        // Weights 1, 1/2, 1/3, 1/4: 12, 6, 4 and 3 of 25.
        let zipf = shares(Stream::Zipf { skew: 1.0, seed: 1 });
        for (found, expected) in zipf.into_iter().zip([0.12, 0.16, 0.24, 0.48]) {
            assert!((found - expected).abs() < 0.01, "{zipf:?}");
        }
        for found in shares(Stream::Uniform { seed: 1 }) {
            assert!((found - 0.25).abs() < 0.01);
        }
        assert_eq!(Stream::Zipf { skew: 1.0, seed: 1 }.tokens(0, 2, 1), [0, 0]);
    }

    #[test]
    fn given_tokens_go_on_and_begin_again() {
        let stream = Stream::Given { ids: vec![1, 2, 3, 4, 5] };
        assert_eq!(stream.tokens(0, 3, 9), [1, 2, 3]);
        assert_eq!(stream.tokens(1, 3, 9), [4, 5, 1]);
        assert_eq!(stream.tokens(2, 3, 9), [2, 3, 4]);
        assert_eq!(stream.tokens(0, 7, 9), [1, 2, 3, 4, 5, 1, 2]);
        assert!(!stream.is_synthetic());
    }

    #[test]
    fn a_trace_has_the_tokens_of_its_lines() {
        let text = "# made by hand\n7 1 3 4\n7 2 0 1\n\n7 1 3 4\n9 1 5 6\n9 2 2 0\n";
        assert_eq!(trace_tokens(text), Ok(vec![7, 7, 9]));
        for (text, line) in [("7 1\n", 1), ("7 1 2\nx 1 2\n", 2), ("7 1 2\n8 2 2\n", 2)] {
            assert_eq!(trace_tokens(text).unwrap_err().line, line, "{text}");
        }
        assert_eq!(trace_tokens(""), Ok(Vec::new()));
    }
}
