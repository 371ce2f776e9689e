//! Byte counts as people write them: 8, 64k, 1M, 2GiB.

/// Reads a byte count; suffixes are powers of 1024.
pub fn parse(text: &str) -> Result<usize, String> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &lower[digits.len()..] {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        other => return Err(format!("unknown suffix '{other}' (k, M and G are powers of 1024)")),
    };
    let number: usize = digits.parse().map_err(|_| "not a byte count".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

/// Writes a byte count in the largest unit that divides it.
pub fn show(bytes: usize) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::{parse, show};

    #[test]
    fn suffixes_are_powers_of_1024() {
        assert_eq!(parse("8"), Ok(8));
        assert_eq!(parse("64k"), Ok(65536));
        assert_eq!(parse("2MiB"), Ok(2 << 20));
        assert_eq!(parse("1G"), Ok(1 << 30));
        assert!(parse("1x").is_err());
        assert!(parse("").is_err());
        assert!(parse("99999999999G").is_err());
    }

    #[test]
    fn shows_the_largest_exact_unit() {
        assert_eq!(show(8), "8 B");
        assert_eq!(show(1536), "1536 B");
        assert_eq!(show(3 << 20), "3 MiB");
    }
}
