//! Which devices NCCL has fused, and which plane a fused device lies in.
//!
//! NCCL fuses once per process, while the plugin may be finalized and initialized again between communicators. A fused
//! device keeps its number then: what was fused is remembered by the names of the ports. It is not counted as a device of
//! the new state, because NCCL would take it for a port if it begins anew; then the next fusing takes its place.

use super::device::{Device, VirtualDevice};
use super::wire::checksum;
use crate::memory::region::MAX_RAILS;
use std::sync::{Arc, Mutex, PoisonError};

/// Marks the plane of a fused device, whose other bits say which planes its members lie in.
const FUSED_PLANE: i32 = 1 << 14;
/// Planes that the bits of such a number can tell apart, as in stock.
const MAX_PLANES: usize = 13;

/// Fused devices that are remembered: as many as NCCL makes at most.
const MOST: usize = 256;

/// What was fused since the library was loaded. A place of a fixed size, because nobody says when it is no longer needed:
/// memory of the heap would stay when the library is gone.
static FUSED: Mutex<Fused> = Mutex::new(Fused { count: 0, ports: [[0; MAX_RAILS]; MOST] });

/// The ports of fused devices, by [`mark`]; 0 behind the last.
struct Fused {
    count: usize,
    ports: [[u64; MAX_RAILS]; MOST],
}

/// Stands for the label of a port: the few dozen ports of a host do not share one by chance.
fn mark(label: &str) -> u64 {
    checksum(label.as_bytes().iter()).max(1)
}

/// What was fused before, in the order of its numbers; nothing in the place of one whose ports are not all there.
pub fn earlier(ports: &[Arc<Device>]) -> Vec<Option<VirtualDevice>> {
    let fused = FUSED.lock().unwrap_or_else(PoisonError::into_inner);
    let find = |wanted: &u64| ports.iter().position(|port| mark(&port.port.label) == *wanted);
    fused.ports[..fused.count]
        .iter()
        .map(|marks| {
            let marks = marks.iter().take_while(|mark| **mark != 0);
            let members = marks.map(find).collect::<Option<Vec<_>>>()?;
            Some(VirtualDevice::fused(members, ports))
        })
        .collect()
}

/// Takes note of the fused device with this number, counted without the ports, and forgets those above.
pub fn remember(number: usize, device: &VirtualDevice, ports: &[Arc<Device>]) {
    let mut fused = FUSED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = fused.ports.get_mut(number) else {
        tracing::info!("{} loses its number when the plugin is initialized again", device.name);
        return;
    };
    let marks = device.members.iter().filter_map(|m| Some(mark(&ports.get(*m)?.port.label)));
    *place = [0; MAX_RAILS];
    place.iter_mut().zip(marks).for_each(|(place, mark)| *place = mark);
    fused.count = number + 1;
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

    #[test]
    fn ports_of_a_host_have_marks_of_their_own() {
        let labels =
            (0..64).flat_map(|device| (1..5).map(move |port| format!("mlx5_{device}:{port}")));
        let marks: std::collections::BTreeSet<_> = labels.map(|label| mark(&label)).collect();
        assert_eq!(marks.len(), 256);
        assert!(!marks.contains(&0));
    }

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
