//! Which partition key of a port is used: a pure function over the port's table and the settings.

use crate::config::Settings;

/// The top bit is the kind of membership and no part of the partition's identity.
const PARTITION: u16 = 0x7fff;

/// No key of a port's table can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{wanted}: the port has no such partition key; its table holds {held}")]
pub struct NoKey {
    /// What was asked for, as the variable that asked.
    pub wanted: String,
    /// The keys there are, with their indices.
    pub held: String,
}

/// The key may receive from members of its partition with full membership only.
pub fn is_limited(key: u16) -> bool {
    key & !PARTITION == 0
}

/// Chooses the index of a key. `table`: indices and keys.
pub fn choose(table: &[(u16, u16)], settings: &Settings) -> Result<u16, NoKey> {
    // An entry whose identity is 0 is an empty place.
    let present = || table.iter().filter(|(_, key)| key & PARTITION != 0);
    let (found, wanted) = if let Some(wanted) = settings.pkey_value {
        let with = |mask: u16| present().find(|(_, key)| key & mask == wanted & mask);
        // The same key; else another kind of membership in the same partition.
        (with(u16::MAX).or_else(|| with(PARTITION)), format!("NCCL_IB_PKEY_VALUE={wanted:#06x}"))
    } else {
        let index = settings.pkey_index;
        // Devices without a table take index 0, which means nothing there.
        if table.is_empty() && index == 0 {
            return Ok(0);
        }
        (present().find(|(known, _)| *known == index), format!("NCCL_IB_PKEY={index}"))
    };
    found.map(|(index, _)| *index).ok_or_else(|| {
        let held: Vec<_> = present().map(|(index, key)| format!("{index} {key:#06x}")).collect();
        let held = if held.is_empty() { "nothing".to_owned() } else { held.join(", ") };
        NoKey { wanted, held }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(table: &[(u16, u16)], name: &str, value: &str) -> Result<u16, String> {
        let (settings, _) = Settings::parse([(name.to_owned(), value.to_owned())]);
        choose(table, &settings).map_err(|e| e.to_string())
    }

    const TABLE: [(u16, u16); 4] = [(0, 0x7fff), (1, 0), (2, 0x8012), (5, 0x0013)];

    #[test]
    fn an_index_must_hold_a_key() {
        assert_eq!(chosen(&TABLE, "NCCL_IB_PKEY", "2"), Ok(2));
        for index in ["1", "3", "400"] {
            let error = chosen(&TABLE, "NCCL_IB_PKEY", index).unwrap_err();
            assert!(error.contains(&format!("NCCL_IB_PKEY={index}:")), "{error}");
            assert!(error.ends_with("holds 0 0x7fff, 2 0x8012, 5 0x0013"), "{error}");
        }
        assert_eq!(chosen(&[], "NCCL_IB_PKEY", "0"), Ok(0));
        assert!(chosen(&[], "NCCL_IB_PKEY", "1").unwrap_err().ends_with("holds nothing"));
    }

    #[test]
    fn a_value_is_found_by_its_partition() {
        assert_eq!(chosen(&TABLE, "NCCL_IB_PKEY_VALUE", "0x8012"), Ok(2));
        assert_eq!(chosen(&TABLE, "NCCL_IB_PKEY_VALUE", "0x8013"), Ok(5));
        assert!(chosen(&TABLE, "NCCL_IB_PKEY_VALUE", "0x8000").is_err());
        let both = [(0, 0x0012), (1, 0x8012)];
        assert_eq!(chosen(&both, "NCCL_IB_PKEY_VALUE", "0x8012"), Ok(1));
        assert_eq!(chosen(&both, "NCCL_IB_PKEY_VALUE", "0x0012"), Ok(0));
    }

    #[test]
    fn membership_is_the_top_bit() {
        assert!(is_limited(0x7fff) && !is_limited(0xffff));
    }
}
