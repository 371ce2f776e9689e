//! Devices and their ports.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex, OnceLock};

use crate::abi::*;
use crate::env::{GidSetting, settings};
use crate::public::{Public, zeroed};
use crate::shm::layout::Header;
use crate::sync::lock;

/// Slots of GID tables (device, port, index) that were changed after the start.
static CHANGED_GIDS: LazyLock<Mutex<HashMap<Slot, GidSetting>>> = LazyLock::new(Mutex::default);
type Slot = (usize, u8, usize);

/// A device. Lives as long as the process: handles of a freed device list stay valid.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    public: Public<IbvDevice>,
    /// Providers look behind the public part for their own data; they must find zeros.
    _provider: [u64; 64],
    /// Ordinal.
    pub index: usize,
}

fn put(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field[..room].iter_mut().zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
}

/// All devices.
pub fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        settings()
            .names
            .iter()
            .enumerate()
            .map(|(index, name)| {
                // SAFETY: integers, pointers and byte arrays.
                let mut public: IbvDevice = unsafe { zeroed() };
                public.node_type = 1;
                put(&mut public.name, name);
                put(&mut public.dev_name, &format!("uverbs{index}"));
                // No such directory: everything that it would say is answered by calls.
                put(&mut public.dev_path, &format!("/dev/shm/softrnic/verbs/{name}"));
                put(&mut public.ibdev_path, &format!("/dev/shm/softrnic/{name}"));
                Device { public: Public::new(public), _provider: [0; 64], index }
            })
            .collect()
    })
}

impl Device {
    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvDevice {
        self.public.ptr()
    }

    /// The device behind a handle, if it is one of ours.
    pub fn find(handle: *mut IbvDevice) -> Option<&'static Self> {
        devices().iter().find(|d| d.ptr() == handle)
    }

    /// Name.
    pub fn name(&self) -> &'static str {
        settings().names.get(self.index).map_or("", String::as_str)
    }

    /// GUID in network byte order, as stored in memory.
    pub fn guid(&self) -> u64 {
        let low = u16::try_from(self.index).unwrap_or(0).wrapping_add(1);
        let bytes = low.to_be_bytes();
        u64::from_ne_bytes([0x02, 0x50, 0xf7, 0xff, 0xfe, 0x5a, bytes[0], bytes[1]])
    }

    /// Device attributes.
    pub fn attributes(&self) -> DeviceAttr {
        let s = settings();
        let int = |v: u32| i32::try_from(v).unwrap_or(i32::MAX);
        // SAFETY: integers and byte arrays.
        let mut attr: DeviceAttr = unsafe { zeroed() };
        put(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
        attr.node_guid = self.guid();
        attr.sys_image_guid = self.guid();
        attr.max_mr_size = u64::MAX >> 1;
        attr.page_size_cap = !0xfff;
        attr.vendor_id = 0x5af7;
        attr.vendor_part_id = 1;
        attr.hw_ver = 1;
        attr.max_qp = int(s.max_qp());
        attr.max_qp_wr = int(s.max_qp_wr());
        // Port-active event, system image GUID, RNR NAK generation, SRQ resize off.
        attr.device_cap_flags = 1 << 10 | 1 << 11 | 1 << 12;
        attr.max_sge = int(s.max_sge());
        attr.max_sge_rd = int(s.max_sge());
        attr.max_cq = int(s.max_cq());
        attr.max_cqe = int(s.max_cqe());
        attr.max_mr = int(s.max_mr());
        attr.max_pd = int(s.max_pd());
        attr.max_qp_rd_atom = i32::from(s.max_rd_atom());
        attr.max_res_rd_atom = i32::from(s.max_rd_atom()).saturating_mul(int(s.max_qp()));
        attr.max_qp_init_rd_atom = i32::from(s.max_rd_atom());
        attr.atomic_cap = 1;
        attr.max_srq = int(s.max_srq());
        attr.max_srq_wr = int(s.max_qp_wr());
        attr.max_srq_sge = int(s.max_sge());
        attr.max_pkeys = u16::try_from(s.pkeys.len()).unwrap_or(1);
        attr.local_ca_ack_delay = 16;
        attr.phys_port_cnt = s.ports();
        attr
    }

    /// Port attributes; `None` for a port that does not exist.
    pub fn port(&self, port: u8, header: &Header) -> Option<PortAttr> {
        let s = settings();
        let slot = self.port_slot(port, header)?;
        let active = slot.state.load(Ordering::Relaxed) == PORT_ACTIVE;
        let (speed, width) = s.speed_width(self.index, port);
        let link = self.link(port);
        let ethernet = link == LINK_ETHERNET;
        Some(PortAttr {
            state: if active { PORT_ACTIVE } else { PORT_DOWN },
            max_mtu: s.mtu_code(),
            active_mtu: s.mtu_code(),
            gid_tbl_len: i32::try_from(s.port_gids(self.index, port).len()).unwrap_or(1),
            // CM supported; IP-based GIDs on Ethernet.
            port_cap_flags: 1 << 16 | if ethernet { 1 << 26 } else { 0 },
            max_msg_sz: s.max_msg_sz(),
            pkey_tbl_len: u16::try_from(s.pkeys.len()).unwrap_or(1),
            lid: s.lid(self.index, port),
            flags: s.port_flags(),
            sm_lid: u16::from(!ethernet),
            max_vl_num: 1,
            active_width: width,
            // Codes that do not fit the old field are only visible in the new one.
            active_speed: u8::try_from(speed).unwrap_or(128),
            // 5 = link up, 3 = disabled.
            phys_state: if active { 5 } else { 3 },
            link_layer: u8::try_from(link).unwrap_or(0),
            active_speed_ex: speed,
            ..PortAttr::default()
        })
    }

    /// A port as peers see it.
    pub fn port_slot<'a>(
        &self,
        port: u8,
        header: &'a Header,
    ) -> Option<&'a crate::shm::layout::PortSlot> {
        if port == 0 || port > settings().ports() {
            return None;
        }
        header.ports.get(self.index)?.get(usize::from(port) - 1)
    }

    /// Link layer code of a port.
    pub fn link(&self, port: u8) -> u32 {
        settings().link(self.index, port)
    }

    /// The GID table of a port, as far as this process made it.
    fn table(&self, port: u8) -> Vec<GidSetting> {
        let changed = lock(&CHANGED_GIDS);
        let mut table = settings().port_gids(self.index, port);
        for (index, entry) in table.iter_mut().enumerate() {
            if let Some(new) = changed.get(&(self.index, port, index)) {
                *entry = *new;
            }
        }
        table
    }

    /// A GID table entry.
    pub fn gid(&self, port: u8, index: usize, header: &Header) -> Option<GidSetting> {
        self.gids(port, header)?.get(index).copied()
    }

    /// The GID table of a port, as it is now.
    pub fn gids(&self, port: u8, header: &Header) -> Option<Vec<GidSetting>> {
        let slot = self.port_slot(port, header)?;
        let mut table = self.table(port);
        for (entry, words) in table.iter_mut().zip(&slot.gid) {
            let halves = [words[0].load(Ordering::Relaxed), words[1].load(Ordering::Relaxed)];
            entry.gid.raw[..8].copy_from_slice(&halves[0].to_ne_bytes());
            entry.gid.raw[8..].copy_from_slice(&halves[1].to_ne_bytes());
        }
        Some(table)
    }

    /// Replaces a GID table entry; `None` where there is no such slot.
    pub fn set_gid(&self, port: u8, index: usize, to: GidSetting) -> Option<()> {
        self.table(port).get(index)?;
        lock(&CHANGED_GIDS).insert((self.index, port, index), to);
        Some(())
    }

    /// Port speed in units of 100 Mb/s.
    pub fn speed(&self, port: u8) -> u64 {
        let (speed, width) = settings().speed_width(self.index, port);
        // Lane rates in 100 Mb/s by speed code; lanes by width code.
        let lane = match speed {
            1 => 25,
            2 => 50,
            4 | 8 => 100,
            16 => 140,
            64 => 500,
            128 => 1000,
            256 => 2000,
            _ => 250,
        };
        let lanes = match width {
            1 => 1,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 4,
        };
        lane * lanes
    }
}

/// The device names that a region publishes.
pub fn names(header: &Header) -> Vec<String> {
    let name = |words: &[std::sync::atomic::AtomicU64]| {
        let bytes: Vec<u8> =
            words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_ne_bytes()).collect();
        let text: Vec<u8> = bytes.into_iter().take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&text).into_owned()
    };
    header.names.iter().map(|words| name(words)).take_while(|name| !name.is_empty()).collect()
}

/// The two native words that a GID occupies in a port slot.
pub fn gid_words(gid: &Gid) -> [u64; 2] {
    let half = |o: usize| u64::from_ne_bytes(std::array::from_fn(|i| gid.raw[o + i]));
    [half(0), half(8)]
}

/// Writes a GID table entry of a port where peers look.
fn publish_gid(slot: &crate::shm::layout::PortSlot, index: usize, entry: &GidSetting) {
    if let Some(to) = slot.gid.get(index) {
        let words = gid_words(&entry.gid);
        to[0].store(words[0], Ordering::Relaxed);
        to[1].store(words[1], Ordering::Relaxed);
    }
}

/// Writes the names of all devices and the state of all ports into a fresh region.
pub fn publish(header: &Header) {
    let s = settings();
    for device in devices() {
        for (word, bytes) in
            header.names[device.index].iter().zip(device.name().as_bytes().chunks(8))
        {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
        }
        for port in 1..=s.ports() {
            let Some(slot) = device.port_slot(port, header) else { continue };
            let gids = device.table(port);
            gids.iter().enumerate().for_each(|(index, gid)| publish_gid(slot, index, gid));
            slot.gids.store(u32::try_from(gids.len()).unwrap_or(0), Ordering::Relaxed);
            slot.lid.store(u32::from(s.lid(device.index, port)), Ordering::Relaxed);
            slot.link.store(device.link(port), Ordering::Relaxed);
            slot.state.store(PORT_ACTIVE, Ordering::Release);
        }
    }
}
