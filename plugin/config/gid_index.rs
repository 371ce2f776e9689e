//! `NCCL_IB_GID_INDEX`: a fixed place in the GID table, for all devices or per device.

use std::ffi::OsStr;
use std::fmt;

use super::value::{Form, Reading, Refused, Value, trimmed, whole_number};

/// The kernel counts GID indices in 8 bits, which is also what fits an address handle.
const MAX_INDEX: i64 = 255;

/// Which GID index a device uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum GidIndex {
    /// Chosen from the table, per device and per connection.
    #[default]
    Automatic,
    /// The same index on every device.
    Fixed(u32),
    /// An index for each device named; devices not named choose automatically.
    PerDevice(Vec<(String, u32)>),
}

impl GidIndex {
    /// The index forced on this device, if any.
    pub fn for_device(&self, device: &str) -> Option<u32> {
        match self {
            Self::Automatic => None,
            Self::Fixed(index) => Some(*index),
            Self::PerDevice(list) => {
                list.iter().find(|(name, _)| name == device).map(|(_, index)| *index)
            }
        }
    }

    /// The devices of the list that are not among those present.
    pub fn unmatched<'a>(&self, present: impl IntoIterator<Item = &'a str>) -> Vec<&str> {
        let Self::PerDevice(list) = self else { return Vec::new() };
        let present: Vec<_> = present.into_iter().collect();
        list.iter().map(|(name, _)| name.as_str()).filter(|name| !present.contains(name)).collect()
    }
}

impl fmt::Display for GidIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Automatic => f.write_str("-1"),
            Self::Fixed(index) => write!(f, "{index}"),
            Self::PerDevice(list) => {
                let entries: Vec<_> =
                    list.iter().map(|(name, index)| format!("{name}:{index}")).collect();
                f.write_str(&entries.join(","))
            }
        }
    }
}

/// Clamps an index; negative numbers are not indices here.
fn index(number: i64, clamped: &mut bool) -> Result<u32, Refused> {
    if number < 0 {
        return Err(Refused);
    }
    *clamped |= number > MAX_INDEX;
    u32::try_from(number.min(MAX_INDEX)).map_err(|_| Refused)
}

impl Value for GidIndex {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        let text = trimmed(text)?;
        let mut clamped = false;
        let mut remarks = Vec::new();
        let value = if let Ok(number) = whole_number(text) {
            // Stock takes any negative number for "choose"; only -1 is documented.
            clamped = number < -1;
            if number < 0 { Self::Automatic } else { Self::Fixed(index(number, &mut clamped)?) }
        } else {
            let mut list: Vec<(String, u32)> = Vec::new();
            for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
                let (name, number) = entry.split_once(':').ok_or(Refused)?;
                let index = index(whole_number(number.trim())?, &mut clamped)?;
                if name.is_empty() {
                    return Err(Refused);
                }
                if list.iter().any(|(known, _)| known == name) {
                    remarks.push(format!("`{name}` is named twice; its first index counts"));
                } else {
                    list.push((name.to_owned(), index));
                }
            }
            if list.is_empty() {
                return Err(Refused);
            }
            Self::PerDevice(list)
        };
        Ok(Reading { value, clamped, remarks })
    }
    fn show(&self, _: &Form) -> String {
        self.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<GidIndex, Refused> {
        GidIndex::read(OsStr::new(text), &Form::Flag).map(|reading| reading.value)
    }

    #[test]
    fn one_number_or_a_list() {
        assert_eq!(read("-1"), Ok(GidIndex::Automatic));
        assert_eq!(read("3"), Ok(GidIndex::Fixed(3)));
        assert_eq!(read("300"), Ok(GidIndex::Fixed(255)));
        let list = read("mlx5_0:3, mlx5_1:1,").unwrap();
        assert_eq!(list.for_device("mlx5_0"), Some(3));
        assert_eq!(list.for_device("mlx5_1"), Some(1));
        assert_eq!(list.for_device("mlx5_11"), None);
        assert_eq!(list.unmatched(["mlx5_0"]), ["mlx5_1"]);
        for bad in ["", "abc", "mlx5_0", "mlx5_0:", ":3", "mlx5_0:-1", ",", "mlx5_0:3;mlx5_1:3"] {
            assert_eq!(read(bad), Err(Refused), "{bad:?}");
        }
    }

    #[test]
    fn a_device_named_twice_is_said() {
        let reading = GidIndex::read(OsStr::new("a:1,a:2"), &Form::Flag).unwrap();
        assert_eq!(reading.value.for_device("a"), Some(1));
        assert_eq!(reading.remarks.len(), 1);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[a-z0-9:,_ -]{0,30}") {
            if let Ok(value) = read(&text) {
                prop_assert_eq!(read(&value.to_string()), Ok(value));
            }
        }
    }
}
