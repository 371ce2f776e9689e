//! `ncclNetProperties_vN`: read field by field from the bytes that a plugin filled, by the offsets of its version.

use std::ffi::{CStr, c_char, c_int};

/// Bytes that a plugin gets for its properties: more than any version's struct (v12: 128), so that what it writes behind
/// the struct is seen.
pub const ROOM: usize = 256;

/// One field of a version's struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its name in NCCL's header.
    pub name: &'static str,
    /// Its place.
    pub offset: usize,
    /// Its size.
    pub size: usize,
}

/// Bytes of the struct.
pub const fn size(version: u8) -> usize {
    match version {
        5 | 6 => 48,
        7 => 56,
        8 => 64,
        9 | 10 => 104,
        11 => 112,
        _ => 128,
    }
}

/// Most members of a fused device.
pub const fn most_members(version: u8) -> usize {
    match version {
        12.. => 8,
        _ => 4,
    }
}

/// All fields of the struct, in order. The members of a fused device are left out: how many count is in `vProps.ndevs`.
pub fn fields(version: u8) -> Vec<Field> {
    // Places where the versions differ: ptrSupport is followed by more and more.
    let (first, members, limits) = match version {
        5..=7 => (28, None, None),
        8 => (32, None, None),
        9..=11 => (36, Some(64), Some(88)),
        _ => (36, Some(64), Some(104)),
    };
    let int = |name, offset| Field { name, offset, size: 4 };
    let long = |name, offset| Field { name, offset, size: 8 };
    let mut fields =
        vec![long("name", 0), long("pciPath", 8), long("guid", 16), int("ptrSupport", 24)];
    if version >= 8 {
        fields.push(int("regIsGlobal", 28));
    }
    if version >= 9 {
        fields.push(int("forceFlush", 32));
    }
    for (index, name) in
        ["speed", "port", "latency", "maxComms", "maxRecvs"].into_iter().enumerate()
    {
        fields.push(int(name, first + 4 * index));
    }
    if version >= 7 {
        fields.push(int("netDeviceType", first + 20));
        fields.push(int("netDeviceVersion", first + 24));
    }
    if let (Some(members), Some(limits)) = (members, limits) {
        fields.push(int("vProps.ndevs", members));
        fields.push(long("maxP2pBytes", limits));
        fields.push(long("maxCollBytes", limits + 8));
        if version >= 11 {
            fields.push(int("maxMultiRequestSize", limits + 16));
        }
        if version >= 12 {
            fields.push(Field { name: "railId", offset: limits + 20, size: 2 });
            fields.push(Field { name: "planeId", offset: limits + 22, size: 2 });
        }
    }
    fields
}

/// What a plugin says of a device. `None`: its version has no such field.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)]
pub struct Properties {
    pub name: Option<String>,
    pub pci_path: Option<String>,
    pub guid: u64,
    pub ptr_support: i32,
    pub reg_is_global: Option<i32>,
    pub force_flush: Option<i32>,
    pub speed: i32,
    pub port: i32,
    pub latency: f32,
    pub max_comms: i32,
    pub max_recvs: i32,
    pub net_device_type: Option<i32>,
    pub net_device_version: Option<i32>,
    pub members: Option<Vec<i32>>,
    pub max_p2p_bytes: Option<u64>,
    pub max_coll_bytes: Option<u64>,
    pub max_multi_request_size: Option<i32>,
    pub rail_id: Option<i32>,
    pub plane_id: Option<i32>,
}

impl Properties {
    /// Reads the struct of a version.
    ///
    /// # Safety
    /// A plugin of this version filled `bytes`, and what its pointers lead to is alive.
    pub unsafe fn read(version: u8, bytes: &[u8; ROOM]) -> Self {
        let fields = fields(version);
        let find = |name| fields.iter().find(|field| field.name == name);
        let long =
            |name| find(name).map_or(0, |field| u64::from_ne_bytes(array(&bytes[field.offset..])));
        let int =
            |name| find(name).map(|field| c_int::from_ne_bytes(array(&bytes[field.offset..])));
        let short =
            |name| find(name).map(|field| i16::from_ne_bytes(array(&bytes[field.offset..])).into());
        // SAFETY: the caller's contract.
        let string = |name| unsafe { text(long(name) as usize as *const c_char) };
        let members = find("vProps.ndevs").map(|field| {
            let count = int("vProps.ndevs").unwrap_or(0).clamp(0, most_members(version) as c_int);
            let at = |index| field.offset + 4 + 4 * index;
            (0..count as usize).map(|i| c_int::from_ne_bytes(array(&bytes[at(i)..]))).collect()
        });
        Self {
            name: string("name"),
            pci_path: string("pciPath"),
            guid: long("guid"),
            ptr_support: int("ptrSupport").unwrap_or(0),
            reg_is_global: int("regIsGlobal"),
            force_flush: int("forceFlush"),
            speed: int("speed").unwrap_or(0),
            port: int("port").unwrap_or(0),
            latency: f32::from_bits(int("latency").unwrap_or(0).cast_unsigned()),
            max_comms: int("maxComms").unwrap_or(0),
            max_recvs: int("maxRecvs").unwrap_or(0),
            net_device_type: int("netDeviceType"),
            net_device_version: int("netDeviceVersion"),
            members,
            max_p2p_bytes: find("maxP2pBytes").map(|_| long("maxP2pBytes")),
            max_coll_bytes: find("maxCollBytes").map(|_| long("maxCollBytes")),
            max_multi_request_size: int("maxMultiRequestSize"),
            rail_id: short("railId"),
            plane_id: short("planeId"),
        }
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[..N]);
    array
}

/// # Safety
/// NULL, or a NUL-terminated string that outlives the call.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's contract.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layouts of NCCL's headers, as their compiler places the last field.
    #[test]
    fn fields_lie_where_the_headers_say() {
        let place = |version, name| {
            fields(version).iter().find(|field| field.name == name).map(|field| field.offset)
        };
        assert_eq!((place(6, "speed"), place(6, "maxRecvs")), (Some(28), Some(44)));
        assert_eq!((place(7, "netDeviceVersion"), place(6, "netDeviceVersion")), (Some(52), None));
        assert_eq!((place(8, "speed"), place(8, "netDeviceVersion")), (Some(32), Some(56)));
        assert_eq!((place(9, "maxRecvs"), place(10, "maxCollBytes")), (Some(52), Some(96)));
        assert_eq!(
            (place(11, "maxMultiRequestSize"), place(10, "maxMultiRequestSize")),
            (Some(104), None)
        );
        assert_eq!((place(12, "maxP2pBytes"), place(12, "planeId")), (Some(104), Some(126)));
        for version in 5..=12 {
            let fields = fields(version);
            assert!(fields.windows(2).all(|pair| pair[0].offset + pair[0].size <= pair[1].offset));
            assert!(fields.last().is_some_and(|last| last.offset + last.size <= size(version)));
        }
    }

    #[test]
    fn values_are_read_from_their_places() {
        let mut bytes = [0; ROOM];
        bytes[36..40].copy_from_slice(&400_000i32.to_ne_bytes());
        bytes[64..68].copy_from_slice(&99i32.to_ne_bytes());
        bytes[68..72].copy_from_slice(&3i32.to_ne_bytes());
        bytes[104..112].copy_from_slice(&(1u64 << 30).to_ne_bytes());
        bytes[126..128].copy_from_slice(&(-1i16).to_ne_bytes());
        // SAFETY: pointers are NULL.
        let v12 = unsafe { Properties::read(12, &bytes) };
        assert_eq!(
            (v12.speed, v12.max_p2p_bytes, v12.plane_id),
            (400_000, Some(1 << 30), Some(-1))
        );
        assert_eq!(
            v12.members,
            Some(vec![3, 0, 0, 0, 0, 0, 0, 0]),
            "no more than the struct holds"
        );
        // SAFETY: as above.
        let v6 = unsafe { Properties::read(6, &bytes) };
        assert_eq!((v6.members, v6.max_p2p_bytes, v6.name), (None, None, None));
    }
}
