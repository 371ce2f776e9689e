//! Which devices NCCL has fused, and which plane a fused device lies in.
//!
//! NCCL fuses once per process, while the plugin may be finalized and initialized again between communicators. A fused
//! device keeps its number then: what was fused is remembered by the names of the ports. It is not counted as a device of
//! the new state, because NCCL would take it for a port if it begins anew; then the next fusing takes its place.

use super::device::{Device, VirtualDevice};
use std::sync::{Arc, Mutex, PoisonError};

/// Marks the plane of a fused device, whose other bits say which planes its members lie in.
const FUSED_PLANE: i32 = 1 << 14;
/// Planes that the bits of such a number can tell apart, as in stock.
const MAX_PLANES: usize = 13;

/// Labels of the ports of each fused device since the process began.
static FUSED: Mutex<Vec<Vec<String>>> = Mutex::new(Vec::new());

/// What was fused before, in the order of its numbers; nothing in the place of one whose ports are not all there.
pub fn earlier(ports: &[Arc<Device>]) -> Vec<Option<VirtualDevice>> {
    let fused = FUSED.lock().unwrap_or_else(PoisonError::into_inner);
    let find = |label: &String| ports.iter().position(|port| port.port.label == *label);
    fused
        .iter()
        .map(|labels| {
            let members = labels.iter().map(find).collect::<Option<Vec<_>>>()?;
            Some(VirtualDevice::fused(members, ports))
        })
        .collect()
}

/// Takes note of the fused device with this number, counted without the ports.
pub fn remember(number: usize, device: &VirtualDevice, ports: &[Arc<Device>]) {
    let labels = device.members.iter().filter_map(|m| Some(ports.get(*m)?.port.label.clone()));
    let mut fused = FUSED.lock().unwrap_or_else(PoisonError::into_inner);
    fused.truncate(number);
    fused.push(labels.collect());
}

/// The plane of a device with members in these planes, on a host with devices in the planes `all`; `None`: undefined.
///
/// A fused device has a number of its own kind, which two of them share if they span the same planes.
pub fn plane(members: &[Option<i32>], all: impl Iterator<Item = Option<i32>>) -> Option<i32> {
    let [first, _, ..] = members else { return *members.first()? };
    first.as_ref()?;
    let mut known: Vec<_> = all.flatten().collect();
    known.sort_unstable();
    known.dedup();
    if known.len() > MAX_PLANES {
        return None;
    }
    members.iter().try_fold(FUSED_PLANE, |bits, plane| {
        let bit = known.iter().position(|known| Some(*known) == *plane)?;
        Some(bits | 1 << bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Planes<'a> = &'a [Option<i32>];

    #[test]
    fn a_fused_device_lies_in_the_planes_of_its_members() {
        let many: Vec<_> = (0..14).map(Some).collect();
        let rows: [(Planes<'_>, Planes<'_>, Option<i32>); 9] = [
            (&[None], &[None], None),
            (&[Some(7)], &[Some(7), Some(9)], Some(7)),
            (&[Some(7), Some(9)], &[Some(7), Some(9)], Some(FUSED_PLANE | 0b11)),
            (&[Some(9), Some(7)], &[Some(9), Some(7), None], Some(FUSED_PLANE | 0b11)),
            (&[Some(9), Some(9)], &[Some(3), Some(9)], Some(FUSED_PLANE | 0b10)),
            (&[Some(9), None], &[Some(9), None], None),
            (&[None, Some(9)], &[Some(9), None], None),
            (&many[..2], &many[..13], Some(FUSED_PLANE | 0b11)),
            (&many[..2], &many, None),
        ];
        for (members, all, wanted) in rows {
            assert_eq!(plane(members, all.iter().copied()), wanted, "{members:?} of {all:?}");
        }
    }
}
