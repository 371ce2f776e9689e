//! What the headers of a shared object say about where it can be loaded. It is read here and not asked of the loader,
//! whose answer to a file of another machine is that there is no file.

use nccl_net_pinrail::host::plain;
use std::path::Path;

/// No plugin is larger; a device or an archive may be.
const LONGEST: u64 = 512 << 20;
/// More entries of any list than this are nonsense.
const MOST: u64 = 1 << 20;

/// A shared object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elf {
    /// 32 or 64.
    pub bits: u8,
    /// Its bytes are in this machine's order.
    pub native_order: bool,
    /// `e_machine`.
    pub machine: u16,
    /// It is a shared object, not a program or an object file.
    pub shared: bool,
    /// Libraries that it needs.
    pub needed: Vec<String>,
    /// Folders that it names to look for them.
    pub runpath: Vec<String>,
    /// Versions that it asks of them: file, version.
    pub versions: Vec<(String, String)>,
    /// Symbols of NCCL plugins that it defines.
    pub plugin_symbols: Vec<String>,
}

impl Elf {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no ELF file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes = plain::read(path, LONGEST).map_err(|error| error.to_string())?;
        Self::parse(&bytes)
    }

    /// Reads the bytes of a file. What lies outside of them is as if it were not there.
    ///
    /// # Errors
    /// They are no ELF file.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.is_empty() {
            return Err("it is empty".into());
        }
        if !bytes.starts_with(b"\x7fELF") || bytes.len() < 20 {
            return Err(format!("it is no ELF file, it begins with {}", beginning(bytes)));
        }
        let little = bytes[5] == 1;
        let half = |at: usize| {
            let pair = [bytes[at], bytes[at + 1]];
            if little { u16::from_le_bytes(pair) } else { u16::from_be_bytes(pair) }
        };
        let mut elf = Self {
            bits: if bytes[4] == 2 { 64 } else { 32 },
            native_order: little == cfg!(target_endian = "little"),
            machine: half(18),
            shared: half(16) == 3,
            ..Self::default()
        };
        if elf.bits == 64 && elf.native_order {
            let image = Image::new(bytes);
            image.dynamic(&mut elf);
            image.symbols(&mut elf);
        }
        Ok(elf)
    }

    /// The newest version of the C library that it asks for.
    pub fn glibc(&self) -> Option<(u32, u32)> {
        let of = |text: &str| numbers(text.strip_prefix("GLIBC_")?);
        self.versions.iter().filter_map(|(_, version)| of(version)).max()
    }

    /// Name of the machine that it is for.
    pub fn machine_name(&self) -> String {
        match self.machine {
            3 => "x86 (32 bit)".into(),
            21 => "ppc64".into(),
            40 => "arm (32 bit)".into(),
            62 => "x86_64".into(),
            183 => "aarch64".into(),
            243 => "riscv".into(),
            other => format!("machine {other}"),
        }
    }

    /// The machine of this program.
    pub fn this_machine() -> u16 {
        if cfg!(target_arch = "aarch64") { 183 } else { 62 }
    }
}

/// `2.36` as two numbers; a third one does not count.
pub fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn beginning(bytes: &[u8]) -> String {
    let first: Vec<u8> = bytes.iter().copied().take(16).collect();
    format!("{:?}", String::from_utf8_lossy(&first))
}

/// The bytes of a 64-bit file in this machine's order.
struct Image<'a> {
    bytes: &'a [u8],
    /// What is loaded where: address, size, place in the file.
    loaded: Vec<(u64, u64, u64)>,
}

impl<'a> Image<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut image = Self { bytes, loaded: Vec::new() };
        image.loaded = image
            .headers()
            .filter(|&at| image.word(at) == Some(1))
            .filter_map(|at| {
                Some((image.long(at + 16)?, image.long(at + 32)?, image.long(at + 8)?))
            })
            .collect();
        image
    }

    fn array<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let at = usize::try_from(at).ok()?;
        self.bytes.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn half(&self, at: u64) -> Option<u16> {
        self.array(at).map(u16::from_ne_bytes)
    }

    fn word(&self, at: u64) -> Option<u32> {
        self.array(at).map(u32::from_ne_bytes)
    }

    fn long(&self, at: u64) -> Option<u64> {
        self.array(at).map(u64::from_ne_bytes)
    }

    /// Places of the program headers.
    fn headers(&self) -> impl Iterator<Item = u64> + use<> {
        let table = self.long(32).unwrap_or(0);
        let (size, count) = (self.half(54).unwrap_or(0), self.half(56).unwrap_or(0));
        (0..u64::from(count)).map(move |index| table.saturating_add(index * u64::from(size)))
    }

    /// Where an address lies in the file.
    fn place(&self, address: u64) -> Option<u64> {
        let (start, _, offset) = self
            .loaded
            .iter()
            .find(|(start, size, _)| address.checked_sub(*start).is_some_and(|at| at < *size))?;
        offset.checked_add(address - start)
    }

    /// A string of the table at `strings`, a place in the file.
    fn string(&self, strings: u64, index: u64) -> Option<String> {
        let at = usize::try_from(strings.checked_add(index)?).ok()?;
        let rest = self.bytes.get(at..)?;
        let end = rest.iter().take(4096).position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn dynamic(&self, elf: &mut Elf) {
        let Some(header) = self.headers().find(|&at| self.word(at) == Some(2)) else { return };
        let Some(start) = self.long(header + 8) else { return };
        let mut entries = Vec::new();
        for index in 0..MOST {
            let at = start.saturating_add(16 * index);
            match (self.long(at), self.long(at.saturating_add(8))) {
                (Some(tag), Some(value)) if tag != 0 => entries.push((tag, value)),
                _ => break,
            }
        }
        let find = |wanted| entries.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value);
        let Some(strings) = find(5).and_then(|address| self.place(address)) else { return };
        for (tag, value) in &entries {
            match tag {
                1 => elf.needed.extend(self.string(strings, *value)),
                15 | 29 => {
                    let paths = self.string(strings, *value).unwrap_or_default();
                    elf.runpath.extend(paths.split(':').map(str::to_owned));
                }
                _ => {}
            }
        }
        // DT_VERNEED and DT_VERNEEDNUM: a list of files, each with a list of versions.
        let mut file = find(0x6fff_fffe).and_then(|address| self.place(address));
        for _ in 0..find(0x6fff_ffff).unwrap_or(0).min(MOST) {
            let Some(at) = file else { return };
            file = self.versions(at, strings, elf);
        }
    }

    /// The versions that are asked of one library; the place of the next.
    fn versions(&self, at: u64, strings: u64, elf: &mut Elf) -> Option<u64> {
        let name = self.string(strings, self.word(at + 4)?.into())?;
        let mut version = at.checked_add(self.word(at + 8)?.into())?;
        for _ in 0..self.half(at + 2)? {
            let text = self.string(strings, self.word(version + 8)?.into())?;
            elf.versions.push((name.clone(), text));
            version = version.checked_add(self.word(version + 12)?.into())?;
        }
        match self.word(at + 12)? {
            0 => None,
            next => at.checked_add(next.into()),
        }
    }

    /// Symbols by the section headers: a stripped file has those of its dynamic symbols still.
    fn symbols(&self, elf: &mut Elf) {
        let table = self.long(40).unwrap_or(0);
        let (size, count) = (self.half(58).unwrap_or(0), self.half(60).unwrap_or(0));
        let section = |index: u64| table.saturating_add(index * u64::from(size));
        let Some(symbols) =
            (0..count.into()).map(section).find(|&at| self.word(at + 4) == Some(11))
        else {
            return;
        };
        let found = || {
            let (start, length) = (self.long(symbols + 24)?, self.long(symbols + 32)?);
            let strings = self.long(section(self.word(symbols + 40)?.into()) + 24)?;
            Some((start, length, strings))
        };
        let Some((start, length, strings)) = found() else { return };
        for index in 0..(length / 24).min(MOST) {
            let at = start.saturating_add(24 * index);
            let (Some(name), Some(defined)) = (self.word(at), self.half(at.saturating_add(6)))
            else {
                return;
            };
            let name = self.string(strings, name.into()).unwrap_or_default();
            if defined != 0 && is_plugin_symbol(&name) {
                elf.plugin_symbols.push(name);
            }
        }
        elf.plugin_symbols.sort();
    }
}

/// `ncclNetPlugin_v12`, `ncclCollNetPlugin_v11`, `ncclTunerPlugin_v4`, `ncclProfiler_v3` and the like.
fn is_plugin_symbol(name: &str) -> bool {
    let Some((kind, number)) = name.rsplit_once("_v") else { return false };
    kind.starts_with("nccl")
        && !number.is_empty()
        && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of_this_program() -> &'static [u8] {
        static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        BYTES.get_or_init(|| std::fs::read("/proc/self/exe").unwrap())
    }

    #[test]
    fn the_headers_of_this_program_are_read() {
        let elf = Elf::parse(of_this_program()).unwrap();
        assert_eq!((elf.bits, elf.native_order, elf.machine), (64, true, Elf::this_machine()));
        assert!(elf.needed.iter().any(|name| name == "libc.so.6"), "{:?}", elf.needed);
        assert!(elf.glibc() >= Some((2, 17)), "{:?}", elf.versions);
    }

    #[test]
    fn what_is_no_elf_file_is_told_by_its_beginning() {
        assert!(Elf::parse(b"").unwrap_err().contains("empty"));
        assert!(Elf::parse(b"#!/bin/sh\nexit 0 and more").unwrap_err().contains("#!/bin/sh"));
        let mut other = of_this_program().to_vec();
        (other[4], other[18]) = (1, 3);
        let elf = Elf::parse(&other).unwrap();
        assert_eq!((elf.bits, elf.machine_name().as_str()), (32, "x86 (32 bit)"));
        assert!(elf.needed.is_empty());
    }

    #[test]
    fn symbols_of_plugins_are_told_from_others() {
        assert!(is_plugin_symbol("ncclNetPlugin_v12") && is_plugin_symbol("ncclProfiler_v3"));
        for other in ["ncclNet", "ncclNetPlugin_v", "ncclNetPlugin_vx", "xncclNetPlugin_v1"] {
            assert!(!is_plugin_symbol(other), "{other}");
        }
    }

    proptest! {
        /// Headers may say anything.
        #[test]
        fn damaged_headers_are_read_without_harm(
            changes in proptest::collection::vec((0usize..4096, any::<u8>()), 1..40),
            length in 0usize..200_000,
        ) {
            let mut bytes = of_this_program()[..length.max(4096)].to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            let _ = Elf::parse(&bytes);
        }
    }
}
