//! Amounts of memory as people read them.

/// `4097 bytes`, `64 KiB`, `9.3 GiB`: exact below a MiB and where a unit fits, else to one tenth.
pub fn amount(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let Some(power) = bytes.checked_ilog2().map(|log| log / 10).filter(|power| *power > 0) else {
        return format!("{bytes} bytes");
    };
    let unit = UNITS[power as usize - 1];
    let one = 1u64 << (10 * power);
    if bytes.is_multiple_of(one) {
        format!("{} {unit}", bytes / one)
    } else if power == 1 {
        format!("{bytes} bytes")
    } else {
        format!("{:.1} {unit}", bytes as f64 / one as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::amount;

    #[test]
    fn amounts_are_short() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (4096, "4 KiB"),
            (4097, "4097 bytes"),
            (9_985_798_963, "9.3 GiB"),
            (64 << 20, "64 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(amount(bytes), text);
        }
    }
}
