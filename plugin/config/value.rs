//! How the text of a variable becomes a typed value.
//!
//! Numbers follow `strtoll` with base 0, as the stock transport reads them: `0x` is hexadecimal, a
//! leading `0` is octal. What differs is what follows a number: text that is not a number as a
//! whole is refused here, where stock silently takes its first digits, or 0.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

/// The unit a number is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A plain count, index or code.
    None,
    /// Bytes.
    Bytes,
    /// Leading bits of an address.
    Bits,
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
}

impl Unit {
    /// The word for documentation; empty for plain numbers.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Bytes => "bytes",
            Self::Bits => "bits",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }
}

/// What a variable accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// 0 or 1.
    Flag,
    /// A number in a closed range.
    Number {
        /// Smallest value that has an effect of its own.
        min: i64,
        /// Largest value that has an effect of its own.
        max: i64,
        /// What is counted.
        unit: Unit,
    },
    /// A number in a closed range, or one special number that means "not set".
    NumberOr {
        /// The special number.
        special: i64,
        /// What the special number stands for, in words.
        meaning: &'static str,
        /// The value it stands for, where the field has no "not set" of its own.
        stands_for: Option<i64>,
        /// Smallest ordinary value.
        min: i64,
        /// Largest ordinary value.
        max: i64,
        /// What is counted.
        unit: Unit,
    },
    /// One of several words.
    Words(&'static [&'static str]),
    /// Text with a syntax of its own, described in words.
    Text(&'static str),
}

impl Form {
    /// The accepted form in words, for messages and documentation.
    pub fn accepts(&self) -> String {
        match self {
            Self::Flag => "0 or 1".to_owned(),
            Self::Number { min, max, .. } => format!("a number from {min} to {max}"),
            Self::NumberOr { special, meaning, min, max, .. } => {
                format!("a number from {min} to {max}, or {special} for {meaning}")
            }
            Self::Words(words) => words.join(", "),
            Self::Text(words) => (*words).to_owned(),
        }
    }

    /// What a number counts.
    pub fn unit(&self) -> Unit {
        match self {
            Self::Number { unit, .. } | Self::NumberOr { unit, .. } => *unit,
            Self::Flag | Self::Words(_) | Self::Text(_) => Unit::None,
        }
    }
}

/// A value read from text, with what had to be done to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading<T> {
    /// The effective value.
    pub value: T,
    /// The text named a number outside the range and the nearest bound was taken.
    pub clamped: bool,
    /// Things the user should know although the value is usable.
    pub remarks: Vec<String>,
}

impl<T> Reading<T> {
    /// A value taken as it was written.
    pub fn exact(value: T) -> Self {
        Self { value, clamped: false, remarks: Vec::new() }
    }
}

/// The text cannot be read as the value at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// A type a setting can have.
pub trait Value: Sized + Default {
    /// Reads a value. Never panics; out-of-range numbers are clamped.
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused>;
    /// The value as text that [`Value::read`] reads back to the same value.
    fn show(&self, form: &Form) -> String;
}

/// The text without surrounding blanks, if it is UTF-8.
pub(super) fn trimmed(text: &OsStr) -> Result<&str, Refused> {
    text.to_str().map(str::trim).ok_or(Refused)
}

/// A whole number in `strtoll` base-0 notation. Values beyond `i64` saturate, so that they clamp
/// like any other number that is too large.
pub fn whole_number(text: &str) -> Result<i64, Refused> {
    saturated(text).map(|(number, _)| number)
}

/// The same, and whether the text names a number beyond `i64`.
fn saturated(text: &str) -> Result<(i64, bool), Refused> {
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => (16, hex),
        None if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        None => (10, digits),
    };
    if digits.is_empty() {
        return Err(Refused);
    }
    let mut number: i64 = 0;
    let mut beyond = false;
    for c in digits.chars() {
        let digit = i64::from(c.to_digit(radix).ok_or(Refused)?);
        let signed = if negative { -digit } else { digit };
        let next = number.checked_mul(i64::from(radix)).and_then(|n| n.checked_add(signed));
        beyond |= next.is_none();
        number = match next {
            Some(next) if !beyond => next,
            _ if negative => i64::MIN,
            _ => i64::MAX,
        };
    }
    Ok((number, beyond))
}

/// Reads a number and applies the form's range. `None` is the form's special number.
fn ranged(text: &OsStr, form: &Form) -> Result<(Option<i64>, bool), Refused> {
    let (number, beyond) = saturated(trimmed(text)?)?;
    let (min, max) = match *form {
        Form::Flag => (0, 1),
        Form::Number { min, max, .. } => (min, max),
        // Whoever goes below the number that means "not set" means that, not the least value.
        Form::NumberOr { special, stands_for, min, .. }
            if number == special || (number < special && special < min) =>
        {
            return Ok((stands_for, number != special));
        }
        Form::NumberOr { min, max, .. } => (min, max),
        Form::Words(_) | Form::Text(_) => return Err(Refused),
    };
    let effective = number.clamp(min, max.max(min));
    // A range may reach as far as the numbers do.
    Ok((Some(effective), effective != number || beyond))
}

/// The text of "not set" for a numeric form.
fn special_text(form: &Form) -> String {
    match form {
        Form::NumberOr { special, .. } => special.to_string(),
        _ => String::new(),
    }
}

macro_rules! number_values {
    ($($ty:ty),+) => { $(
        impl Value for $ty {
            fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
                let (number, clamped) = ranged(text, form)?;
                let value = Self::try_from(number.ok_or(Refused)?).map_err(|_| Refused)?;
                Ok(Reading { value, clamped, remarks: Vec::new() })
            }
            fn show(&self, _: &Form) -> String {
                self.to_string()
            }
        }
        impl Value for Option<$ty> {
            fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
                let (number, clamped) = ranged(text, form)?;
                let value = number.map(<$ty>::try_from).transpose().map_err(|_| Refused)?;
                Ok(Reading { value, clamped, remarks: Vec::new() })
            }
            fn show(&self, form: &Form) -> String {
                self.map_or_else(|| special_text(form), |number| number.to_string())
            }
        }
    )+ };
}
number_values!(u8, u16, u32, usize);

impl Value for bool {
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
        let (number, clamped) = ranged(text, form)?;
        Ok(Reading { value: number.ok_or(Refused)? != 0, clamped, remarks: Vec::new() })
    }
    fn show(&self, _: &Form) -> String {
        u8::from(*self).to_string()
    }
}

impl Value for Option<bool> {
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
        let (number, clamped) = ranged(text, form)?;
        Ok(Reading { value: number.map(|n| n != 0), clamped, remarks: Vec::new() })
    }
    fn show(&self, form: &Form) -> String {
        self.map_or_else(|| special_text(form), |flag| u8::from(flag).to_string())
    }
}

impl Value for Duration {
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
        let (number, clamped) = ranged(text, form)?;
        let count = u64::try_from(number.ok_or(Refused)?).map_err(|_| Refused)?;
        let value = match form.unit() {
            Unit::Seconds => Self::from_secs(count),
            _ => Self::from_millis(count),
        };
        Ok(Reading { value, clamped, remarks: Vec::new() })
    }
    fn show(&self, form: &Form) -> String {
        match form.unit() {
            Unit::Seconds => self.as_secs().to_string(),
            _ => self.as_millis().to_string(),
        }
    }
}

impl Value for Option<PathBuf> {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        Ok(Reading::exact((!text.is_empty()).then(|| PathBuf::from(text))))
    }
    fn show(&self, _: &Form) -> String {
        self.as_ref().map_or_else(String::new, |path| path.to_string_lossy().into_owned())
    }
}

impl Value for Option<String> {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        let text = trimmed(text)?;
        Ok(Reading::exact((!text.is_empty()).then(|| text.to_owned())))
    }
    fn show(&self, _: &Form) -> String {
        self.clone().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTE: Form = Form::Number { min: 0, max: 31, unit: Unit::None };
    const MAYBE: Form = Form::NumberOr {
        special: -1,
        meaning: "automatic",
        stands_for: None,
        min: 0,
        max: 255,
        unit: Unit::None,
    };

    fn byte(text: &str) -> Result<(u8, bool), Refused> {
        u8::read(OsStr::new(text), &BYTE).map(|r| (r.value, r.clamped))
    }

    #[test]
    fn numbers_follow_strtoll_but_as_a_whole() {
        assert_eq!(byte("20"), Ok((20, false)));
        assert_eq!(byte(" 0x1f\t"), Ok((31, false)));
        assert_eq!(byte("017"), Ok((15, false)));
        assert_eq!(byte("+7"), Ok((7, false)));
        assert_eq!(byte("300"), Ok((31, true)));
        assert_eq!(byte("-4"), Ok((0, true)));
        assert_eq!(byte("99999999999999999999999"), Ok((31, true)));
        for bad in ["", "abc", "20s", "1.5", "0x", "-", "--1", "08", "1 2"] {
            assert_eq!(byte(bad), Err(Refused), "{bad:?}");
        }
    }

    #[test]
    fn the_special_number_is_not_clamped() {
        let read =
            |text| <Option<u8>>::read(OsStr::new(text), &MAYBE).map(|r| (r.value, r.clamped));
        assert_eq!(read("-1"), Ok((None, false)));
        assert_eq!(read("-2"), Ok((None, true)));
        assert_eq!(read("256"), Ok((Some(255), true)));
        assert_eq!(read("106"), Ok((Some(106), false)));
    }

    #[test]
    fn a_number_beyond_all_numbers_is_said_to_be_out_of_range() {
        let form = Form::Number { min: 0, max: i64::MAX, unit: Unit::Bytes };
        let read = |text: &str| <usize>::read(OsStr::new(text), &form).map(|r| r.clamped);
        assert_eq!(read("9223372036854775807"), Ok(false));
        for text in ["9223372036854775808", "0xffffffffffffffff", "99999999999999999999999"] {
            assert_eq!(read(text), Ok(true), "{text}");
            assert_eq!(whole_number(&format!("-{}", text)), Ok(i64::MIN), "{text}");
        }
    }

    #[test]
    fn durations_use_the_unit_of_the_form() {
        let ms = Form::Number { min: 0, max: 1000, unit: Unit::Milliseconds };
        let s = Form::Number { min: 1, max: 1000, unit: Unit::Seconds };
        assert_eq!(
            Duration::read(OsStr::new("100"), &ms).unwrap().value,
            Duration::from_millis(100)
        );
        assert_eq!(Duration::read(OsStr::new("100"), &s).unwrap().value, Duration::from_secs(100));
        assert_eq!(Duration::from_secs(60).show(&s), "60");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in any::<String>()) {
            let _ = byte(&text);
            let _ = whole_number(&text);
        }

        #[test]
        fn every_i64_reads_back(number in any::<i64>()) {
            prop_assert_eq!(whole_number(&number.to_string()), Ok(number));
        }

        #[test]
        fn shown_values_read_back(value in proptest::option::of(any::<u8>())) {
            let shown = value.show(&MAYBE);
            let read = <Option<u8>>::read(OsStr::new(&shown), &MAYBE);
            prop_assert_eq!(read, Ok(Reading::exact(value)));
        }
    }
}
