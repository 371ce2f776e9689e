//! Devices of this host: their facts, gathered once, and their resources, open only while something uses them.

use super::address::{KnownAddresses, PortAddress, resolve};
use super::exhaustion::explain;
use super::fusion;
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::host::descriptors;
use crate::host::pci;
use crate::host::sysfs::Sysfs;
use crate::memory::Registry;
use crate::memory::diagnosis::Machine;
use crate::memory::region::MAX_RAILS;
use crate::verbs::context::DeviceList;
use crate::verbs::mlx5;
use crate::verbs::sys::{LINK_LAYER_ETHERNET, PORT_ACTIVE};
use crate::verbs::{Context, MemoryRegion, PortAttr, ProtectionDomain, Verbs};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One active port of one device, as NCCL sees it.
#[derive(Debug)]
pub struct Device {
    /// The port.
    pub port: Port,
    /// Its number among the ports of this process.
    pub index: u8,
    /// `sys_image_guid`, in host order.
    pub guid: u64,
    /// Mb/s.
    pub speed: u32,
    /// Port number reported to NCCL: counts the functions of one adapter.
    pub reported_port: u32,
    /// Normalised sysfs path of the PCI function, if there is one.
    pub pci_path: Option<String>,
    /// Queue pairs that the device can have.
    pub max_qp: u32,
    /// Largest completion queue.
    pub max_cqe: u32,
    /// Registrations that the device can have; 0 where it does not say.
    pub max_mr: u64,
    /// Largest registration, in bytes; 0 where it does not say.
    pub max_mr_size: u64,
    /// Largest payload of one work request, in bytes.
    pub max_message: u32,
    /// Whether device memory can be registered by address.
    pub peer_memory: bool,
    /// Whether DMA-BUFs can be registered.
    pub dmabuf: bool,
    /// Ethernet or InfiniBand.
    pub ethernet: bool,
    /// Rail and plane from the device filter.
    pub rail: Option<i32>,
    /// See `rail`.
    pub plane: Option<i32>,
    open: Arc<Mutex<Shared>>,
    known: Arc<KnownAddresses>,
}

/// A port and how it is called in messages.
#[derive(Clone, Debug)]
pub struct Port {
    /// Kernel name of the device.
    pub device: String,
    /// Port number, from 1.
    pub number: u8,
    /// `device:port`.
    pub label: String,
}

/// An open device, wherever something uses it: communicators and listeners, or only memory registered with it.
#[derive(Debug, Default)]
struct Shared {
    open: Weak<OpenDevice>,
    registry: Weak<Registry>,
}

/// An open device, shared by all ports and communicators that use it.
#[derive(Debug)]
pub struct OpenDevice {
    /// The device.
    pub context: Arc<Context>,
    /// The one protection domain.
    pub pd: Arc<ProtectionDomain>,
    /// Registrations in it.
    pub registry: Arc<Registry>,
    /// The addresses that its ports were last used under.
    pub known: Arc<KnownAddresses>,
}

impl OpenDevice {
    fn new(
        context: Arc<Context>,
        known: &Arc<KnownAddresses>,
        machine: &Machine,
    ) -> Result<Arc<Self>> {
        let pd = ProtectionDomain::new(&context)
            .map_err(|e| explain(e, context.name(), Some(&context), 0, machine))?;
        Ok(Self::over(Registry::new(&pd), known))
    }

    /// The device whose protection domain has this registry.
    fn over(registry: Arc<Registry>, known: &Arc<KnownAddresses>) -> Arc<Self> {
        let pd = Arc::clone(registry.pd());
        let context = Arc::clone(pd.context());
        Arc::new(Self { context, pd, registry, known: Arc::clone(known) })
    }
}

/// One rail of a connection: a device in use and its address.
#[derive(Clone, Debug)]
pub struct Rail {
    /// The device.
    pub device: Arc<Device>,
    /// Its resources.
    pub open: Arc<OpenDevice>,
    /// The port's address.
    pub address: PortAddress,
}

impl Device {
    /// Opens the device, or shares it with whoever has it open.
    ///
    /// # Errors
    /// The device is gone or cannot be opened.
    pub fn open(&self, verbs: &Arc<Verbs>, machine: &Machine) -> Result<Arc<OpenDevice>> {
        let mut shared = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // One that failed serves what still holds it, and nobody else.
        if let Some(open) = shared.open.upgrade().filter(|open| !open.registry.is_broken()) {
            return Ok(open);
        }
        if let Some(registry) = shared.registry.upgrade().filter(|r| !r.is_broken()) {
            let open = OpenDevice::over(registry, &self.known);
            shared.open = Arc::downgrade(&open);
            return Ok(open);
        }
        enough_descriptors(&self.port.device)?;
        let list = DeviceList::get(verbs)?;
        let index = (0..list.len())
            .find(|i| list.name(*i) == self.port.device)
            .ok_or_else(|| Error::system(format!("{} is no longer there", self.port.device)))?;
        let context =
            list.open(index).map_err(|e| explain(e, &self.port.device, None, 0, machine))?;
        let open = OpenDevice::new(context, &self.known, machine)?;
        *shared = Shared { open: Arc::downgrade(&open), registry: Arc::downgrade(&open.registry) };
        Ok(open)
    }

    /// The device, open, as a rail of a new connection, under the address that its port has now.
    ///
    /// # Errors
    /// The port is not active or has no usable address any more.
    pub fn use_over(self: &Arc<Self>, open: Arc<OpenDevice>, settings: &Settings) -> Result<Rail> {
        let (address, choice) = resolve(&open.context, &self.port, settings)?;
        if let Some(before) = self.known.replace(address).filter(|b| !b.same_gid(&address)) {
            tracing::warn!(
                "{} is used under GID {} from here on ({}), and was under {before}",
                self.port.label,
                choice.entry,
                choice.reason
            );
        }
        Ok(Rail { device: Arc::clone(self), open, address })
    }
}

/// Finds the devices that the settings select, in the order NCCL sees them.
///
/// # Errors
/// The library cannot list devices. A single device that fails is skipped with a warning.
pub fn discover(verbs: &Arc<Verbs>, settings: &Settings) -> Result<Vec<Arc<Device>>> {
    let sysfs = Sysfs::from_settings(settings);
    let machine = Machine::from_settings(settings);
    enough_descriptors("devices")?;
    let list = DeviceList::get(verbs)?;
    let mut devices = Vec::new();
    let mut seen = Vec::new();
    let names: Vec<_> = (0..list.len()).map(|index| list.name(index)).collect();
    for lost in sysfs.devices().iter().filter(|kernel| !names.contains(kernel)) {
        tracing::info!(
            "the kernel has {lost}, but the verbs library does not offer it: is its provider installed?"
        );
    }
    for token in settings.gid_index.unmatched(names.iter().map(String::as_str)) {
        tracing::warn!("NCCL_IB_GID_INDEX: there is no device {token}");
    }
    for (index, name) in names.iter().enumerate() {
        let context = list.open(index).map_err(|e| explain(e, name, None, 0, &machine));
        match context.and_then(|context| OpenDevice::new(context, &Arc::default(), &machine)) {
            Ok(open) => ports_of(&open, &sysfs, settings, &mut devices, &mut seen),
            Err(e) => {
                tracing::warn!("device {}{}", left_out(name, e), node_hint(&sysfs, name));
            }
        }
    }
    for token in settings.hca.unmatched(seen.iter().map(|(n, p): &(String, u8)| (n.as_str(), *p))) {
        tracing::warn!("NCCL_IB_HCA: {token} matches no port of this host");
    }
    let offsets = pci::real_port_offsets(devices.iter().map(|d| d.pci_path.as_deref()));
    for (device, offset) in devices.iter_mut().zip(offsets) {
        device.reported_port = u32::from(device.port.number) + offset;
    }
    let order = if settings.device_pci_order {
        pci::pci_order(devices.iter().map(|d| d.pci_path.as_deref()))
    } else {
        (0..devices.len()).collect()
    };
    for (place, index) in order.iter().enumerate() {
        devices[*index].index = u8::try_from(place).unwrap_or(u8::MAX);
    }
    let mut devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
    devices.sort_by_key(|device| device.index);
    Ok(devices)
}

/// Why something is not offered, its name said once: errors mostly begin with it.
fn left_out(name: &str, why: impl std::fmt::Display) -> String {
    let why = why.to_string();
    let reason = why.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&why);
    format!("{name} is left out: {reason}")
}

/// Says so where there are not enough descriptors to open something: a library that lacks them may find nothing instead.
fn enough_descriptors(what: &str) -> Result<()> {
    let count = descriptors::FOR_A_DEVICE;
    descriptors::spare(count).map_err(|e| {
        Error::io(format_args!("opening {what}, which takes {count} descriptors,"), &e)
    })
}

/// What to look at where a device cannot be opened: in a container it is mostly the node that is missing.
fn node_hint(sysfs: &Sysfs, device: &str) -> String {
    let Some(node) = sysfs.verbs_node(device) else { return String::new() };
    let node = Path::new("/dev/infiniband").join(node);
    let node = node.display();
    match std::fs::metadata(node.to_string()) {
        Ok(_) => format!(
            "; its node {node} is there: look at its permissions and at the container's device rules"
        ),
        Err(e) => format!("; its node {node} cannot be seen ({e}): was it given to the container?"),
    }
}

fn ports_of(
    open: &Arc<OpenDevice>,
    sysfs: &Sysfs,
    settings: &Settings,
    devices: &mut Vec<Device>,
    seen: &mut Vec<(String, u8)>,
) {
    let context = &open.context;
    let name = context.name().to_owned();
    let attr = match context.query_device() {
        Ok(attr) => attr,
        Err(e) => {
            tracing::warn!("device {}", left_out(&name, e));
            return;
        }
    };
    if sysfs.driver(&name).as_deref() == Some("mlx5_core")
        && let Some(path) = mlx5::data_direct(context)
    {
        tracing::info!("{name}: its Data Direct interface {path} is not used yet");
    }
    let shared = Arc::default();
    let dmabuf = MemoryRegion::dmabuf_supported(&open.pd, context.verbs());
    for number in 1..=attr.phys_port_cnt {
        let label = format!("{name}:{number}");
        let port = Port { device: name.clone(), number, label };
        seen.push((name.clone(), number));
        let state = match context.query_port(number) {
            Ok(state) => state,
            Err(e) => {
                tracing::warn!("{}", left_out(&port.label, e));
                continue;
            }
        };
        if state.state != PORT_ACTIVE {
            tracing::info!("{} is left out: port state {}, not active", port.label, state.state);
            continue;
        }
        let decision = settings.hca.matches(&name, number);
        if !decision.selected {
            tracing::info!("{} is left out: {}", port.label, decision.reason);
            continue;
        }
        let address = match resolve(context, &port, settings) {
            Ok((address, choice)) => {
                tracing::info!("{}: GID {}: {}", port.label, choice.entry, choice.reason);
                if let Some(warning) = &choice.warning {
                    tracing::warn!("{}: {warning}", port.label);
                }
                address
            }
            Err(e) => {
                tracing::warn!("{}", left_out(&port.label, e));
                continue;
            }
        };
        open.known.replace(address);
        devices.push(Device {
            guid: u64::from_be(attr.sys_image_guid),
            speed: speed(context, number, &state, settings),
            reported_port: number.into(),
            pci_path: sysfs.pci_path(&name).map(|path| pci::merged_path(&path, settings.merge_vfs)),
            max_qp: attr.max_qp.try_into().unwrap_or(0),
            max_mr: attr.max_mr.try_into().unwrap_or(0),
            max_mr_size: attr.max_mr_size,
            max_cqe: attr.max_cqe.try_into().unwrap_or(0),
            // Some devices state nothing; a message that a signed length can hold is the least the ABI needs.
            max_message: match state.max_msg_sz {
                0 => i32::MAX as u32,
                bytes => bytes,
            },
            peer_memory: sysfs.peermem().is_some(),
            dmabuf,
            ethernet: state.link_layer == LINK_LAYER_ETHERNET,
            rail: decision.rail,
            plane: decision.plane,
            open: Arc::clone(&shared),
            index: 0,
            known: Arc::clone(&open.known),
            port,
        });
    }
}

/// Mb/s from the port speed verb, or width × lane speed.
fn speed(context: &Context, port: u8, attr: &PortAttr, settings: &Settings) -> u32 {
    if settings.query_port_speed
        && let Some(speed) = context.query_port_speed(port)
    {
        return u32::try_from(speed).unwrap_or(u32::MAX);
    }
    let lane = match attr.active_speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        // XDR, and what is faster than anything known.
        _ => 200_000,
    };
    let width = match attr.active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    if attr.active_speed == 0 { 10_000 } else { lane * width }
}

/// A device as NCCL counts them: one port, or several fused into one.
#[derive(Clone, Debug)]
pub struct VirtualDevice {
    /// Indices of the ports; one for a plain device.
    pub members: Vec<usize>,
    /// Names joined by `+`.
    pub name: String,
}

impl VirtualDevice {
    /// Made of several of `ports`.
    pub fn fused(members: Vec<usize>, ports: &[Arc<Device>]) -> Self {
        let names: Vec<_> = members
            .iter()
            .filter_map(|m| ports.get(*m))
            .map(|port| port.port.device.as_str())
            .collect();
        Self { name: names.join("+"), members }
    }
}

/// All devices of this process.
#[derive(Debug)]
pub struct Devices {
    ports: Vec<Arc<Device>>,
    virtuals: Vec<VirtualDevice>,
    /// What was fused before these devices were found, in the place of what will be.
    earlier: Vec<Option<VirtualDevice>>,
}

impl Devices {
    /// Every port as a device of its own.
    pub fn new(ports: Vec<Arc<Device>>) -> Self {
        let virtuals = ports
            .iter()
            .enumerate()
            .map(|(index, port)| VirtualDevice {
                members: vec![index],
                // As stock does, for two ports of one device too: topology tells them apart by port number.
                name: port.port.device.clone(),
            })
            .collect();
        let earlier = fusion::earlier(&ports);
        Self { ports, virtuals, earlier }
    }

    /// Number of devices, fused ones included.
    pub fn len(&self) -> usize {
        self.virtuals.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.virtuals.is_empty()
    }

    /// Device `index`.
    ///
    /// # Errors
    /// There is no such device.
    pub fn get(&self, index: i32) -> Result<&VirtualDevice> {
        let earlier = |i: usize| self.earlier.get(i.checked_sub(self.ports.len())?)?.as_ref();
        let find = |i| self.virtuals.get(i).or_else(|| earlier(i));
        usize::try_from(index).ok().and_then(find).ok_or_else(|| {
            Error::argument(format!(
                "there is no device {index}; this host has {}",
                self.virtuals.len()
            ))
        })
    }

    /// Every port.
    pub fn all_ports(&self) -> &[Arc<Device>] {
        &self.ports
    }

    /// The ports of a device.
    pub fn ports(&self, device: &VirtualDevice) -> Vec<Arc<Device>> {
        device.members.iter().filter_map(|m| self.ports.get(*m)).cloned().collect()
    }

    /// Adds a device made of several; returns its index.
    ///
    /// # Errors
    /// A member does not exist, is named twice or is itself fused, or the link layers differ.
    pub fn fuse(&mut self, members: &[i32]) -> Result<i32> {
        if members.is_empty() || members.len() > MAX_RAILS {
            return Err(Error::argument(format!(
                "a fused device has 1 to {MAX_RAILS} members, not {}",
                members.len()
            )));
        }
        let mut ports: Vec<usize> = Vec::new();
        for member in members {
            let index = usize::try_from(*member).ok().filter(|i| *i < self.ports.len());
            let index =
                index.ok_or_else(|| Error::argument(format!("device {member} cannot be fused")))?;
            if ports.contains(&index) {
                return Err(Error::argument(format!("device {member} is named twice")));
            }
            ports.push(index);
        }
        let of = |i: &usize| &self.ports[*i];
        if ports.iter().any(|p| of(p).ethernet != of(&ports[0]).ethernet) {
            return Err(Error::usage("devices of different link layers cannot be fused"));
        }
        let device = VirtualDevice::fused(ports, &self.ports);
        fusion::remember(self.virtuals.len() - self.ports.len(), &device, &self.ports);
        tracing::info!("{} made of devices {members:?}", device.name);
        self.virtuals.push(device);
        i32::try_from(self.virtuals.len() - 1).map_err(|_| Error::usage("too many devices"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    #[test]
    fn a_name_is_said_once() {
        for (name, why, text) in [
            ("mlx5_0:1", "mlx5_0:1: no GID", "mlx5_0:1 is left out: no GID"),
            ("mlx5_0:1", "mlx5_0:12: no GID", "mlx5_0:1 is left out: mlx5_0:12: no GID"),
            ("mlx5_0:1", "ibv_query_port failed", "mlx5_0:1 is left out: ibv_query_port failed"),
        ] {
            assert_eq!(left_out(name, why), text);
        }
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_told_with_its_node() {
        let tree = Tree::new(&[
            ("class/infiniband/mlx5_0/device/infiniband_verbs/uverbs9999/abi_version", "1\n"),
            ("class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n"),
        ]);
        let sysfs = Sysfs::at(tree.root());
        let hint = node_hint(&sysfs, "mlx5_0");
        assert!(hint.contains("/dev/infiniband/uverbs9999 cannot be seen (No such file"), "{hint}");
        assert_eq!(node_hint(&sysfs, "rxe0"), "");
    }
}
