//! What a conversion is asked for. Owns bits, groups and scales by class and by part, and how users
//! write them.

use std::fmt;
use std::str::FromStr;

use tierkeep_plans::catalogue::container::{ContainerClass, ContainerPart};
use tierkeep_plans::catalogue::{Group, Packed, PackedBits, ScaleType};
use tierkeep_plans::units::Bytes;

/// Data bytes of one output file unless asked otherwise: what published checkpoints use.
pub const DEFAULT_SHARD_BYTES: Bytes = Bytes(5_000_000_000);

/// How many bits a weight is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Packed integers.
    Packed(PackedBits),
    /// Floats of 16 bits: bf16 of what is stored as f32 or fp8; f16 and bf16 as they are.
    Sixteen,
    /// As the source stores it.
    Keep,
}

impl Bits {
    /// Integers that are written, `None` where floats are.
    #[must_use]
    pub fn packed(self) -> Option<PackedBits> {
        match self {
            Self::Packed(bits) => Some(bits),
            Self::Sixteen | Self::Keep => None,
        }
    }
}

/// Why an option could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as {what}: write {choices}")]
pub struct OptionError {
    /// What was given.
    pub text: String,
    /// What it should say.
    pub what: &'static str,
    /// What can be written.
    pub choices: String,
}

impl FromStr for Bits {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        match text {
            "16" => Ok(Self::Sixteen),
            "8" => Ok(Self::Packed(PackedBits::Eight)),
            "4" => Ok(Self::Packed(PackedBits::Four)),
            "2" => Ok(Self::Packed(PackedBits::Two)),
            "keep" => Ok(Self::Keep),
            _ => Err(option_error(text, "bits", "8, 4, 2, 16 or keep")),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed(bits) => write!(f, "{}", bits.number()),
            Self::Sixteen => f.write_str("16"),
            Self::Keep => f.write_str("keep"),
        }
    }
}

fn option_error(text: &str, what: &'static str, choices: impl Into<String>) -> OptionError {
    OptionError { text: text.to_owned(), what, choices: choices.into() }
}

/// Reads what shares a scale, as users write it.
///
/// # Errors
/// [`OptionError`] for what is none of the choices.
pub fn group_from_text(text: &str) -> Result<Group, OptionError> {
    let known = Group::ALL.into_iter().find(|group| group.name() == text);
    known.ok_or_else(|| option_error(text, "a group", "row, 128, 64 or 32"))
}

/// Reads the type of scales, as users write it.
///
/// # Errors
/// [`OptionError`] for what is none of the choices.
pub fn scale_from_text(text: &str) -> Result<ScaleType, OptionError> {
    let known = ScaleType::ALL.into_iter().find(|scale| scale.name() == text);
    known.ok_or_else(|| option_error(text, "a type of scales", "f32 or f16"))
}

/// How the scales of packed integers are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// What shares a scale. Rows that are no wider than a group have one scale.
    pub group: Group,
    /// How a scale is stored.
    pub scale: ScaleType,
}

impl Packing {
    /// The plain form, which others write and read too.
    pub const PLAIN: Self = Self { group: Group::Row, scale: ScaleType::F32 };

    /// What is written unless asked otherwise: a quarter of a bit a weight more than rows at most, and
    /// what it gains is measured in docs/numerics.md.
    pub const DEFAULT: Self = Self { group: Group::Of64, scale: ScaleType::F16 };
}

/// How one kind of weight is written: `8`, `4-g64-f16`, `4-row-f32`, `16`, `keep`. What is not said of
/// scales is the conversion's own [`Packing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Bits of an element.
    pub bits: Bits,
    /// What shares a scale, where it is not what the conversion says.
    pub group: Option<Group>,
    /// How a scale is stored, likewise.
    pub scale: Option<ScaleType>,
}

impl From<Bits> for Form {
    fn from(bits: Bits) -> Self {
        Self { bits, group: None, scale: None }
    }
}

impl Form {
    /// The packed integers that it asks for, with what it leaves open filled in.
    #[must_use]
    pub fn packed(self, packing: Packing) -> Option<Packed> {
        let bits = self.bits.packed()?;
        let group = self.group.unwrap_or(packing.group);
        Some(Packed { bits, group, scale: self.scale.unwrap_or(packing.scale) })
    }
}

impl FromStr for Form {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut words = text.split('-');
        let bits = words.next().unwrap_or_default();
        let mut form = Self::from(bits.strip_prefix("int").unwrap_or(bits).parse::<Bits>()?);
        for word in words {
            let wrong = || {
                let choices = "BITS[-GROUP][-SCALE] with a group of row, g128, g64 or g32 and a scale \
                               of f32 or f16, such as 4-g64-f16; 16 and keep have neither";
                option_error(text, "bits with a group and scales", choices)
            };
            let group = match word.strip_prefix('g') {
                Some(cols) => group_from_text(cols).ok().filter(|group| *group != Group::Row),
                None => (word == "row").then_some(Group::Row),
            };
            let scale = scale_from_text(word).ok();
            let is_again = group.is_some() && (form.group.is_some() || form.scale.is_some())
                || scale.is_some() && form.scale.is_some();
            if (group.is_none() && scale.is_none()) || is_again || form.bits.packed().is_none() {
                return Err(wrong());
            }
            form.group = group.or(form.group);
            form.scale = scale.or(form.scale);
        }
        Ok(form)
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bits)?;
        match self.group {
            Some(Group::Row) => f.write_str("-row")?,
            Some(group) => write!(f, "-g{}", group.name())?,
            None => {}
        }
        self.scale.map_or(Ok(()), |scale| write!(f, "-{}", scale.name()))
    }
}

/// How the weights of one class are written: one form for all, and other forms for some parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    base: Form,
    parts: [Option<Form>; ContainerPart::ALL.len()],
}

impl<T: Into<Form>> From<T> for Choices {
    fn from(form: T) -> Self {
        Self { base: form.into(), parts: [None; ContainerPart::ALL.len()] }
    }
}

impl Choices {
    /// The form of a part.
    #[must_use]
    pub fn of(&self, part: Option<ContainerPart>) -> Form {
        let own = part.and_then(|part| self.parts.get(part as usize).copied().flatten());
        own.unwrap_or(self.base)
    }

    /// The same with another form for one part.
    #[must_use]
    pub fn with(mut self, part: ContainerPart, form: impl Into<Form>) -> Self {
        if let Some(of_part) = self.parts.get_mut(part as usize) {
            *of_part = Some(form.into());
        }
        self
    }

    /// Reads `FORM`, `PART=FORM,...` or `FORM,PART=FORM,...` of a class. Without a form for all, the
    /// parts that are not named have the class's default. Of two that name the same part the later
    /// counts.
    ///
    /// # Errors
    /// [`OptionError`] for a form or a part that is none of the choices.
    pub fn from_text(class: ContainerClass, text: &str) -> Result<Self, OptionError> {
        let mut choices = ConvertOptions::default().class(class);
        for (index, word) in text.split(',').map(str::trim).enumerate() {
            let Some((name, form)) = word.split_once('=') else {
                if index > 0 {
                    let first = "the form of all first, then parts as PART=FORM";
                    return Err(option_error(text, "forms of parts", first));
                }
                choices = Self::from(word.parse::<Form>()?);
                continue;
            };
            let parts = ContainerPart::named(class, name);
            if parts.is_empty() {
                return Err(option_error(name, "a part", part_names(class)));
            }
            let form: Form = form.parse()?;
            choices = parts.into_iter().fold(choices, |choices, part| choices.with(part, form));
        }
        Ok(choices)
    }

    /// As [`Choices::from_text`] reads it.
    fn in_words(&self, class: ContainerClass) -> String {
        let of_part = |part: ContainerPart| {
            let form = self.parts.get(part as usize).copied().flatten()?;
            Some(format!(",{}={form}", part.name_in(class)))
        };
        let parts: String = ContainerPart::ALL.into_iter().filter_map(of_part).collect();
        format!("{}{parts}", self.base)
    }
}

/// Every name of parts of a class.
fn part_names(class: ContainerClass) -> String {
    let mut names: Vec<&str> = Vec::new();
    for part in ContainerPart::ALL.into_iter().filter(|part| part.is_in(class)) {
        let whole = part.name_in(class);
        let kind = whole.split_once('.').map(|(kind, _)| kind);
        for name in kind.into_iter().chain([whole]) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    match names.pop() {
        Some(last) if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        last => last.unwrap_or_default().to_owned(),
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Routed experts of the decoder layers.
    pub experts: Choices,
    /// Attention, dense and shared feed-forward, the indexer's queries and keys.
    pub dense: Choices,
    /// Token embedding and output head.
    pub embedding: Choices,
    /// Every matrix of the multi-token-prediction layers, their experts included.
    pub mtp: Choices,
    /// Scales where a form does not say.
    pub packing: Packing,
    /// Most data bytes of one output file; one expert or one matrix is never split.
    pub shard_bytes: Bytes,
}

impl Default for ConvertOptions {
    /// 8 bits everywhere, in groups: a choice for quality, not the smallest. docs/numerics.md says what
    /// fewer bits cost.
    fn default() -> Self {
        let eight = Choices::from(Bits::Packed(PackedBits::Eight));
        Self {
            experts: eight,
            dense: eight,
            embedding: eight,
            mtp: eight,
            packing: Packing::DEFAULT,
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
    }
}

impl ConvertOptions {
    /// The choices of a class.
    #[must_use]
    pub fn class(&self, class: ContainerClass) -> Choices {
        match class {
            ContainerClass::Experts => self.experts,
            ContainerClass::Dense => self.dense,
            ContainerClass::Embedding => self.embedding,
            ContainerClass::Mtp => self.mtp,
        }
    }

    /// The options as arguments of the command line.
    #[must_use]
    pub fn in_words(&self) -> String {
        let mut words: Vec<String> = ContainerClass::ALL
            .into_iter()
            .map(|class| format!("--{} {}", class.name(), self.class(class).in_words(class)))
            .collect();
        words.push(format!("--group {}", self.packing.group.name()));
        words.push(format!("--scales {}", self.packing.scale.name()));
        words.push(format!("--shard {}", self.shard_bytes.0));
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(text: &str) -> Result<Choices, OptionError> {
        Choices::from_text(ContainerClass::Experts, text)
    }

    #[test]
    fn forms_are_read_as_stored_types_are_named() {
        let form = |text: &str| text.parse::<Form>();
        let four = Form::from(Bits::Packed(PackedBits::Four));
        assert_eq!(form("4"), Ok(four));
        let grouped = Form { group: Some(Group::Of64), scale: Some(ScaleType::F16), ..four };
        for text in ["4-g64-f16", "int4-g64-f16"] {
            assert_eq!(form(text), Ok(grouped));
        }
        assert_eq!(grouped.to_string(), "4-g64-f16");
        assert_eq!(form("4-row"), Ok(Form { group: Some(Group::Row), ..four }));
        assert_eq!(form("4-f32"), Ok(Form { scale: Some(ScaleType::F32), ..four }));
        assert_eq!(form("16"), Ok(Form::from(Bits::Sixteen)));
        for wrong in ["", "3", "4-", "4-64", "4-g48", "4-grow", "4-f16-g64", "4-g64-g32", "16-g64"]
        {
            assert!(form(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            form("3").map_err(|e| e.to_string()),
            Err("cannot read \"3\" as bits: write 8, 4, 2, 16 or keep".to_owned())
        );
    }

    #[test]
    fn parts_are_named_apart_and_the_later_counts() {
        let four: Form = Bits::Packed(PackedBits::Four).into();
        let eight: Form = Bits::Packed(PackedBits::Eight).into();
        let choices = experts("4,down=8").unwrap_or_else(|e| unreachable!("{e}"));
        assert_eq!(choices.of(Some(ContainerPart::ExpertDown)), eight);
        assert_eq!(choices.of(Some(ContainerPart::ExpertGate)), four);
        assert_eq!(choices.of(None), four);
        assert_eq!(choices.in_words(ContainerClass::Experts), "4,down=8");
        assert_eq!(experts("gate=4,up=4,down=4,down=8"), experts("gate=4,up=4,down=8"));
        let dense = Choices::from_text(ContainerClass::Dense, "4,attention=8,attention.output=16");
        let dense = dense.unwrap_or_else(|e| unreachable!("{e}"));
        assert_eq!(dense.of(Some(ContainerPart::Latent)), eight);
        assert_eq!(dense.of(Some(ContainerPart::Output)), Bits::Sixteen.into());
        assert_eq!(dense.of(Some(ContainerPart::SharedUp)), four);
    }

    #[test]
    fn what_cannot_be_read_names_the_choices() {
        let message = |text| experts(text).map_err(|e| e.to_string());
        let expected = "cannot read \"middle\" as a part: write gate, up or down";
        assert_eq!(message("middle=4"), Err(expected.to_owned()));
        assert!(message("down=8,4").is_err_and(|e| e.contains("the form of all first")));
        let dense = Choices::from_text(ContainerClass::Dense, "head=4").map_err(|e| e.to_string());
        assert!(
            dense.is_err_and(|e| e.contains("attention, attention.query") && e.contains("shared"))
        );
    }

    #[test]
    fn words_say_every_choice() {
        let words = ConvertOptions::default().in_words();
        assert!(words.starts_with("--experts 8"), "{words}");
        assert!(words.ends_with("--shard 5000000000"), "{words}");
    }
}
