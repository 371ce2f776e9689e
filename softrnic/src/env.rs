//! Settings: one table, read once.
//!
//! Every `SOFTRNIC_*` variable is one row: name, kind, default, range and prose. A bad value is reported on
//! stderr and clamped or replaced by the default; an unknown `SOFTRNIC_*` name is reported too, because a
//! misspelt setting that silently does nothing makes a test prove the wrong thing.

mod table;

use std::sync::OnceLock;

use crate::abi::{
    GID_TYPE_IB, GID_TYPE_ROCE_V1, GID_TYPE_ROCE_V2, Gid, LINK_ETHERNET, LINK_INFINIBAND,
};
use crate::fork::Pair;
use crate::ledger::placement::{GRAMMAR, Placement};
use crate::ledger::quota::Quota;
use table::N;
pub use table::{NUMBERS, Number, TEXTS, Text};

/// Most devices of one process.
pub const MAX_DEVICES: usize = 16;
/// Most ports of one device.
pub const MAX_PORTS: usize = 4;
/// Most GIDs of one port.
pub const MAX_GIDS: usize = 16;
/// Most scatter/gather entries of one request; bounds the iovec arrays on the stack.
pub const MAX_SGE: usize = 30;
/// Most inline bytes of one request.
pub const MAX_INLINE: usize = 1024;

/// Who makes progress with send requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The call that posts them; polling and an assisting thread, where they have to wait.
    Inline,
    /// Whoever steps, on a virtual clock.
    Stepped,
    /// A thread of the process.
    Thread,
}

/// One GID table entry.
#[derive(Clone, Copy, Debug)]
pub struct GidSetting {
    /// The address.
    pub gid: Gid,
    /// Type as in the C header.
    pub kind: u32,
    /// Interface index.
    pub ifindex: u32,
}

/// The effective settings.
#[derive(Debug)]
pub struct Settings {
    numbers: Vec<u64>,
    /// Fabric name, reduced to characters that may stand in a file name.
    pub fabric: String,
    /// Device names.
    pub names: Vec<String>,
    /// Link layer codes of the ports in order; the last one counts for all later ports.
    links: Vec<u32>,
    /// Speed codes of the ports in order; the last counts for the rest.
    speeds: Vec<u32>,
    /// GID tables of the ports in order; later ports count up from the last one.
    gids: Vec<Vec<GidSetting>>,
    /// P_Key table.
    pub pkeys: Vec<u16>,
    /// Whether send requests are held from the start.
    pub hold: bool,
    /// Which kernel and library are presented when it comes to forked children.
    pub fork: Pair,
    /// Who makes progress.
    pub engine: Engine,
    /// Path of the fault plan, or nothing.
    pub faults: String,
    /// Which pages are in CMA.
    pub cma: Placement,
    /// The memlock quota.
    pub memlock: Quota,
    /// Whether a registration may ask for relaxed ordering.
    pub relaxed_ordering: bool,
    /// How a device refuses dma-bufs: an errno, or 0 where it takes them. The last one is for the devices that follow.
    dmabuf: Vec<i32>,
}

fn warn(name: &str, value: &str, why: &str, effective: &str) {
    eprintln!("softrnic: WARN SOFTRNIC_{name}={value}: {why}; using {effective}");
}

fn number(row: &Number) -> u64 {
    let Ok(text) = std::env::var(format!("SOFTRNIC_{}", row.name)) else { return row.default };
    let Some(value) = parse_u64(&text) else {
        warn(row.name, &text, "not a number", &row.default.to_string());
        return row.default;
    };
    let clamped = value.clamp(row.min, row.max);
    if clamped != value {
        let why = format!("outside {}..={}", row.min, row.max);
        warn(row.name, &text, &why, &clamped.to_string());
    }
    clamped
}

fn parse_u64(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

fn text(name: &str) -> String {
    let default = TEXTS.iter().find(|t| t.name == name).map_or("", |t| t.default);
    std::env::var(format!("SOFTRNIC_{name}")).unwrap_or_else(|_| default.to_owned())
}

fn choice(name: &str, options: &[&str], fallback: usize) -> usize {
    let value = text(name);
    options.iter().position(|o| *o == value).unwrap_or_else(|| {
        warn(name, &value, "not one of the choices", options[fallback]);
        fallback
    })
}

fn cma() -> Placement {
    let value = text("CMA");
    Placement::parse(&value).unwrap_or_else(|| {
        warn("CMA", &value, GRAMMAR, "off");
        Placement::Off
    })
}

fn memlock() -> Quota {
    let value = text("MEMLOCK");
    match value.trim() {
        "off" => Quota::Off,
        "rlimit" => Quota::Rlimit,
        bytes => parse_u64(bytes).map(Quota::Bytes).unwrap_or_else(|| {
            warn("MEMLOCK", &value, "not off, rlimit or a number of bytes", "off");
            Quota::Off
        }),
    }
}

fn dmabuf() -> Vec<i32> {
    let value = text("DMABUF");
    let words = [("yes", 0), ("no", libc::EOPNOTSUPP), ("unknown", libc::EPROTONOSUPPORT)];
    let errno = |entry: &str| {
        words.iter().find(|(word, _)| *word == entry.trim()).map_or_else(
            || {
                warn("DMABUF", entry, "not yes, no or unknown", "yes");
                0
            },
            |(_, errno)| *errno,
        )
    };
    value.split(',').map(errno).collect()
}

/// Reads `address[/v1|/v2|/ib][@ifindex]`, or `-` for an empty slot.
pub fn parse_gid(entry: &str, link: u32) -> Option<GidSetting> {
    if entry == "-" {
        return Some(GidSetting { gid: Gid::default(), kind: GID_TYPE_IB, ifindex: 0 });
    }
    let (entry, ifindex) = match entry.split_once('@') {
        Some((head, index)) => (head, index.trim().parse().ok()?),
        None => (entry, 0),
    };
    let default = if link == LINK_ETHERNET { GID_TYPE_ROCE_V2 } else { GID_TYPE_IB };
    let (address, kind) = match entry.split_once('/') {
        Some((head, "v1")) => (head, GID_TYPE_ROCE_V1),
        Some((head, "v2")) => (head, GID_TYPE_ROCE_V2),
        Some((head, "ib")) => (head, GID_TYPE_IB),
        Some(_) => return None,
        None => (entry, default),
    };
    let address = match address.trim().parse().ok()? {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        std::net::IpAddr::V6(v6) => v6,
    };
    Some(GidSetting { gid: Gid { raw: address.octets() }, kind, ifindex })
}

fn gid_table(text: &str, link: u32) -> Vec<GidSetting> {
    let default = if link == LINK_ETHERNET { "192.168.77.1" } else { "fe80::5aff:1" };
    let mut table = Vec::new();
    for entry in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
        match parse_gid(entry, link) {
            Some(gid) if table.len() < MAX_GIDS => table.push(gid),
            Some(_) => warn("GIDS", text, "too many entries", "the first ones"),
            None => {
                warn("GIDS", entry, "not address[/v1|/v2|/ib][@ifindex] or -", "the other entries");
            }
        }
    }
    if table.is_empty() {
        table.extend(parse_gid(default, link));
    }
    table
}

fn gids(links: &[u32]) -> Vec<Vec<GidSetting>> {
    let link = |port: usize| links.get(port).or(links.last()).copied().unwrap_or(LINK_ETHERNET);
    text("GIDS").split(';').enumerate().map(|(port, table)| gid_table(table, link(port))).collect()
}

fn speeds() -> Vec<u32> {
    let value = text("SPEED");
    let code = |entry: &str| match parse_u64(entry).and_then(|v| u32::try_from(v).ok()) {
        Some(code) if (1..=1024).contains(&code) => code,
        _ => {
            warn("SPEED", &value, "not a code from 1 to 1024, or a comma list of them", "32");
            32
        }
    };
    value.split(',').map(code).collect()
}

fn links() -> Vec<u32> {
    let value = text("LINK");
    let code = |word: &str| match word.trim() {
        "ethernet" => LINK_ETHERNET,
        "ib" => LINK_INFINIBAND,
        _ => {
            warn("LINK", &value, "not ethernet or ib, or a comma list of them", "ethernet");
            LINK_ETHERNET
        }
    };
    value.split(',').map(code).collect()
}

fn pkeys() -> Vec<u16> {
    let value = text("PKEYS");
    let mut table: Vec<u16> = Vec::new();
    for entry in value.split(',').filter(|e| !e.trim().is_empty()) {
        match parse_u64(entry).and_then(|v| u16::try_from(v).ok()) {
            Some(key) if table.len() < 128 => table.push(key),
            _ => warn("PKEYS", entry, "not a 16-bit key", "the other entries"),
        }
    }
    if table.is_empty() {
        table.push(0xffff);
    }
    table
}

fn names(count: usize) -> Vec<String> {
    let value = text("NAME");
    let list: Vec<&str> = value.split(',').map(str::trim).filter(|n| !n.is_empty()).collect();
    let valid =
        |n: &str| n.len() < 48 && n.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    if list.is_empty() || !list.iter().all(|n| valid(n)) {
        warn("NAME", &value, "not a device name", "softrnic");
        return (0..count).map(|i| format!("softrnic{i}")).collect();
    }
    if list.len() == 1 && !list[0].ends_with(|c: char| c.is_ascii_digit()) {
        return (0..count).map(|i| format!("{}{i}", list[0])).collect();
    }
    (0..count)
        .map(|i| list.get(i).map_or_else(|| format!("{}x{i}", list[0]), |n| (*n).to_owned()))
        .collect()
}

impl Settings {
    fn read() -> Self {
        let numbers: Vec<u64> = NUMBERS.iter().map(number).collect();
        for (key, _) in std::env::vars_os() {
            let Some(key) = key.to_str().and_then(|k| k.strip_prefix("SOFTRNIC_")) else {
                continue;
            };
            let known = NUMBERS.iter().map(|n| n.name).chain(TEXTS.iter().map(|t| t.name));
            // LIB_DIR belongs to the test programs: where to find the built library.
            if key != "LIB_DIR" && !known.into_iter().any(|n| n == key) {
                eprintln!("softrnic: WARN unknown setting SOFTRNIC_{key}");
            }
        }
        let links = links();
        let fabric_text = text("FABRIC");
        let mut fabric: String = fabric_text
            .chars()
            .take(64)
            .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' })
            .collect();
        if fabric.is_empty() {
            fabric.push_str("default");
        }
        if fabric != fabric_text {
            warn("FABRIC", &fabric_text, "not a plain name of up to 64 characters", &fabric);
        }
        let devices = usize::try_from(numbers[N::DEVICES as usize]).unwrap_or(1);
        Self {
            fabric,
            names: names(devices),
            gids: gids(&links),
            links,
            speeds: speeds(),
            pkeys: pkeys(),
            hold: choice("HOLD", &["none", "sq", "all"], 0) != 0,
            fork: [Pair::CopyOnFork, Pair::OldKernel, Pair::OldLibrary]
                [choice("FORK", &["copy-on-fork", "old-kernel", "old-library"], 0)],
            engine: [Engine::Inline, Engine::Stepped, Engine::Thread]
                [choice("ENGINE", &["inline", "stepped", "thread"], 0)],
            faults: text("FAULTS"),
            cma: cma(),
            memlock: memlock(),
            relaxed_ordering: choice("RELAXED_ORDERING", &["yes", "no"], 0) == 0,
            dmabuf: dmabuf(),
            numbers,
        }
    }

    fn n(&self, which: N) -> u64 {
        self.numbers[which as usize]
    }

    fn n32(&self, which: N) -> u32 {
        u32::try_from(self.n(which)).unwrap_or(u32::MAX)
    }

    /// Why a device takes no dma-bufs, if it does not.
    pub fn refuses_dmabuf(&self, device: usize) -> Option<i32> {
        let errno = self.dmabuf.get(device).or(self.dmabuf.last()).copied().unwrap_or(0);
        (errno != 0).then_some(errno)
    }

    /// Ports per device.
    pub fn ports(&self) -> u8 {
        u8::try_from(self.n(N::PORTS)).unwrap_or(1)
    }

    /// The MTU as the header's code (1 = 256 … 5 = 4096).
    pub fn mtu_code(&self) -> u32 {
        self.n(N::MTU).ilog2().saturating_sub(7)
    }

    /// Speed code, width code of a port.
    pub fn speed_width(&self, device: usize, port: u8) -> (u32, u8) {
        let at = device * usize::from(self.ports()) + usize::from(port.saturating_sub(1));
        let speed = self.speeds.get(at).or(self.speeds.last()).copied().unwrap_or(32);
        (speed, u8::try_from(self.n(N::WIDTH)).unwrap_or(2))
    }

    /// Position of a port among all ports of the process.
    fn ordinal(&self, device: usize, port: u8) -> usize {
        device * usize::from(self.ports()) + usize::from(port.saturating_sub(1))
    }

    /// Link layer code of a port.
    pub fn link(&self, device: usize, port: u8) -> u32 {
        let at = self.ordinal(device, port);
        self.links.get(at).or(self.links.last()).copied().unwrap_or(LINK_ETHERNET)
    }

    /// LID of a port.
    pub fn lid(&self, device: usize, port: u8) -> u16 {
        if self.link(device, port) == LINK_ETHERNET {
            return u16::try_from(self.n(N::ETHERNET_LID)).unwrap_or(0);
        }
        let first = u16::try_from(self.n(N::LID)).unwrap_or(1);
        first.wrapping_add(u16::try_from(self.ordinal(device, port)).unwrap_or(0))
    }

    /// Port flags, of which there is one: a global header is required.
    pub fn port_flags(&self) -> u8 {
        u8::from(self.n(N::GRH) != 0)
    }

    /// Options of the extension word (ECE) that devices know.
    pub fn ece_options(&self) -> u32 {
        self.n32(N::ECE)
    }

    /// Largest number of QPs.
    pub fn max_qp(&self) -> u32 {
        self.n32(N::MAX_QP)
    }

    /// Largest number of CQs.
    pub fn max_cq(&self) -> u32 {
        self.n32(N::MAX_CQ)
    }

    /// Largest number of MRs, as reported.
    pub fn max_mr(&self) -> u32 {
        self.n32(N::MAX_MR)
    }

    /// Largest number of MRs, as enforced.
    pub fn mr_limit(&self) -> u32 {
        match self.n32(N::MR_LIMIT) {
            0 => self.max_mr(),
            limit => limit.min(self.max_mr()),
        }
    }

    /// The registration that fails, counted from 1; 0 = none.
    pub fn fail_reg_mr(&self) -> u64 {
        self.n(N::FAIL_REG_MR)
    }

    /// Time that a registration of so many pages takes.
    pub fn reg_delay(&self, pages: u64) -> std::time::Duration {
        let fixed = self.n(N::REG_US) * 1000;
        let paged = self.n(N::REG_PAGE_NS).saturating_mul(pages);
        std::time::Duration::from_nanos(fixed.saturating_add(paged))
    }

    /// Largest number of PDs.
    pub fn max_pd(&self) -> u32 {
        self.n32(N::MAX_PD)
    }

    /// Largest number of SRQs.
    pub fn max_srq(&self) -> u32 {
        self.n32(N::MAX_SRQ)
    }

    /// Largest queue depth.
    pub fn max_qp_wr(&self) -> u32 {
        self.n32(N::MAX_QP_WR)
    }

    /// Largest CQ.
    pub fn max_cqe(&self) -> u32 {
        self.n32(N::MAX_CQE)
    }

    /// Largest scatter/gather list.
    pub fn max_sge(&self) -> u32 {
        self.n32(N::MAX_SGE)
    }

    /// Largest inline payload.
    pub fn max_inline(&self) -> u32 {
        self.n32(N::MAX_INLINE)
    }

    /// Largest message.
    pub fn max_msg_sz(&self) -> u32 {
        self.n32(N::MAX_MSG_SZ)
    }

    /// Largest READ/ATOMIC depth.
    pub fn max_rd_atom(&self) -> u8 {
        u8::try_from(self.n(N::MAX_RD_ATOM)).unwrap_or(16)
    }

    /// Empty polls between two yields; 0 = never yield.
    pub fn yield_every(&self) -> u32 {
        self.n32(N::YIELD)
    }

    /// Bytes of address space for rings.
    pub fn heap_bytes(&self) -> usize {
        usize::try_from(self.n(N::HEAP_MB) << 20).unwrap_or(512 << 20)
    }

    /// Seed of the stepped engine, and of fault plans without one.
    pub fn seed(&self) -> u64 {
        self.n(N::SEED)
    }

    /// Steps of every poll of a CQ, in the stepped engine.
    pub fn steps(&self) -> u32 {
        self.n32(N::STEPS)
    }

    /// Transport retry time that replaces timeout × retries.
    pub fn retry_override(&self) -> Option<std::time::Duration> {
        match self.n(N::RETRY_MS) {
            0 => None,
            ms => Some(std::time::Duration::from_millis(ms)),
        }
    }

    /// GID table of one port at the start: its own, or the last one with the number of ports from there added to the last
    /// 16 bits of every address.
    pub fn port_gids(&self, device: usize, port: u8) -> Vec<GidSetting> {
        let at = self.ordinal(device, port);
        let from = at.min(self.gids.len().saturating_sub(1));
        let step = u16::try_from(at - from).unwrap_or(0);
        let mut table = self.gids.get(from).cloned().unwrap_or_default();
        for entry in table.iter_mut().filter(|entry| entry.gid != Gid::default()) {
            let last =
                u16::from_be_bytes([entry.gid.raw[14], entry.gid.raw[15]]).wrapping_add(step);
            entry.gid.raw[14..].copy_from_slice(&last.to_be_bytes());
        }
        table
    }
}

/// The settings, read at first use.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_entries_parse_with_type_and_interface() {
        let gid = parse_gid("10.1.2.3/v1@7", LINK_ETHERNET).expect("valid entry");
        assert_eq!(gid.gid.raw[10..], [0xff, 0xff, 10, 1, 2, 3]);
        assert_eq!((gid.kind, gid.ifindex), (GID_TYPE_ROCE_V1, 7));
        assert!(parse_gid("10.1.2.3/v9", LINK_ETHERNET).is_none());
        assert!(parse_gid("rubbish", LINK_ETHERNET).is_none());
        assert_eq!(parse_gid("-", LINK_ETHERNET).expect("an empty slot").gid, Gid::default());
    }

    #[test]
    fn numbers_accept_decimal_and_hex() {
        assert_eq!(parse_u64(" 0x10 "), Some(16));
        assert_eq!(parse_u64("10"), Some(10));
        assert_eq!(parse_u64("-1"), None);
    }
}
