//! What befalls a process from outside its program: ports, GIDs, dead devices, broken queues. Everything acts on the
//! tables in the region, so that a peer and the `softrnic` command can do it as well as the process itself.

use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::cq::signal_async;
use crate::device::gid_words;
use crate::process::Process;
use crate::responder::Target;
use crate::ring::BROKEN;
use crate::shm::layout::{CONTEXTS, DEAD, PortSlot, QpSlot};
use crate::shm::peer::Peer;
use crate::stats::{self, Counter};
use crate::trace::{self, What};

/// Raises an event in every context of a device; how many there are.
pub fn raise(peer: &Peer, device: usize, kind: u32, element: u32) -> usize {
    let mut raised = 0;
    for index in (0..CONTEXTS).filter_map(|i| u32::try_from(i).ok()) {
        let Some(slot) = peer.region.context(index) else { continue };
        let open = slot.fd.load(Ordering::Acquire) != 0;
        if open && slot.device.load(Ordering::Relaxed) as usize == device {
            signal_async(peer, index, kind, element, 0);
            raised += 1;
        }
    }
    raised
}

fn port_slot(peer: &Peer, device: usize, port: u8) -> Option<&PortSlot> {
    let slot = peer.region.header().ports.get(device)?.get(usize::from(port).checked_sub(1)?)?;
    // An absent port has no link layer.
    Some(slot).filter(|slot| slot.link.load(Ordering::Relaxed) != 0)
}

/// Takes a port down or up, with its event.
pub fn port(peer: &Peer, device: usize, port: u8, up: bool) -> Result<(), i32> {
    let slot = port_slot(peer, device, port).ok_or(libc::EINVAL)?;
    let state = if up { PORT_ACTIVE } else { PORT_DOWN };
    if slot.state.swap(state, Ordering::SeqCst) == state {
        return Ok(());
    }
    trace::add(What::Port, 0, 0, (device as u64) << 8 | u64::from(port), u64::from(up));
    raise(peer, device, if up { EVENT_PORT_ACTIVE } else { EVENT_PORT_ERR }, u32::from(port));
    if up {
        // Its owner may sleep over requests that waited for the port.
        peer.region.kick();
    }
    Ok(())
}

/// Changes an entry of a port's GID table, with the event.
pub fn gid(peer: &Peer, device: usize, port: u8, index: u8, gid: Gid) -> Result<(), i32> {
    let slot = port_slot(peer, device, port).ok_or(libc::EINVAL)?;
    if u32::from(index) >= slot.gids.load(Ordering::Relaxed) {
        return Err(libc::EINVAL);
    }
    let entry = slot.gid.get(usize::from(index)).ok_or(libc::EINVAL)?;
    let words = gid_words(&gid);
    entry[0].store(words[0], Ordering::Relaxed);
    entry[1].store(words[1], Ordering::Relaxed);
    raise(peer, device, EVENT_GID_CHANGE, u32::from(port));
    Ok(())
}

/// Moves a queue pair to the error state with an event, and flushes its receives. Its sends are flushed by its owner.
pub fn kill_qp(us: &Process, peer: &Peer, qpn: u32) -> Result<(), i32> {
    let index = qpn & 0xffff;
    let slot = peer.region.qp(index).ok_or(libc::EINVAL)?;
    let guard = slot.lock.lock(us.id(), |id| us.fabric.alive(id));
    if qpn == 0 || slot.qpn.load(Ordering::Acquire) != qpn {
        return Err(libc::EINVAL);
    }
    Target { process: us, peer, index, slot }.fail(Some(EVENT_QP_FATAL));
    drop(guard);
    peer.region.kick();
    Ok(())
}

/// Lets a device die: its event, its ports, all its queue pairs. Only closing all devices of the process heals it.
pub fn device_fatal(us: &Process, peer: &Peer, device: usize) -> Result<(), i32> {
    let header = peer.region.header();
    let dead = header.dead.get(device).ok_or(libc::EINVAL)?;
    if port_slot(peer, device, 1).is_none() {
        return Err(libc::EINVAL);
    }
    if dead.swap(DEAD, Ordering::SeqCst) == DEAD {
        return Ok(());
    }
    raise(peer, device, EVENT_DEVICE_FATAL, 0);
    for slot in header.ports.get(device).into_iter().flatten() {
        if slot.link.load(Ordering::Relaxed) != 0 {
            slot.state.store(PORT_DOWN, Ordering::SeqCst);
        }
    }
    for (index, slot) in qps(peer) {
        let port = slot.port.load(Ordering::Relaxed);
        if port != 0 && (port >> 8) as usize == device {
            let _guard = slot.lock.lock(us.id(), |id| us.fabric.alive(id));
            Target { process: us, peer, index, slot }.fail(None);
        }
    }
    peer.region.kick();
    Ok(())
}

/// Live queue pairs of a process.
pub fn qps(peer: &Peer) -> impl Iterator<Item = (u32, &QpSlot)> {
    // The table is sparse memory: only what was ever used is looked at.
    let top = peer.region.header().qp_top.load(Ordering::Relaxed);
    (0..top)
        .map_while(|index| peer.region.qp(index).map(|slot| (index, slot)))
        .filter(|(_, slot)| slot.qpn.load(Ordering::Acquire) != 0)
}

/// Overruns a completion queue: CQ_ERR, and nothing arrives in it any more.
pub fn break_cq(peer: &Peer, index: u32) {
    let Some(slot) = peer.region.cq(index) else { return };
    if slot.overrun.swap(BROKEN, Ordering::AcqRel) == 0 {
        stats::add(Counter::CqOverruns, 1);
        let generation = slot.generation.load(Ordering::Relaxed);
        signal_async(peer, slot.ctx.load(Ordering::Relaxed), EVENT_CQ_ERR, index, generation);
    }
}
