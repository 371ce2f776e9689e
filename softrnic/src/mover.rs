//! Moves payload between address spaces.
//!
//! Inside one process a copy suffices; between processes the kernel copies (`process_vm_*`), so that the target
//! needs no thread and may even be stopped. Visibility rule: if a payload ends on an 8-byte boundary, its last 8
//! bytes become visible after everything before them, because receivers poll the last word. Elements of an iovec
//! are copied in order, so the last word is an element of its own.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::list::List;

/// One contiguous piece, laid out as `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Seg {
    /// First address in its process.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
}

const _: () = assert!(size_of::<Seg>() == size_of::<libc::iovec>());

/// A list of segments that is used up from the front.
#[derive(Clone, Debug, Default)]
pub struct Segs {
    first: usize,
    list: List<Seg, 6>,
}

impl Segs {
    /// Appends a piece; empty ones are dropped.
    #[inline]
    pub fn push(&mut self, addr: u64, len: usize) {
        if let (Ok(addr), true) = (usize::try_from(addr), len > 0) {
            self.list.push(Seg { addr, len });
        }
    }

    /// The pieces that are left.
    #[inline]
    pub fn as_slice(&self) -> &[Seg] {
        self.list.as_slice().get(self.first..).unwrap_or(&[])
    }

    /// Sum of the lengths.
    pub fn total(&self) -> usize {
        self.as_slice().iter().fold(0, |sum, s| sum.saturating_add(s.len))
    }

    /// Splits an aligned last word off, so that it is copied last.
    #[inline]
    fn split_last_word(&mut self) {
        let Some(last) = self.list.as_mut_slice().last_mut() else { return };
        if last.len > 8 && (last.addr + last.len).is_multiple_of(8) {
            last.len -= 8;
            let word = Seg { addr: last.addr + last.len, len: 8 };
            self.list.push(word);
        }
    }

    /// The bytes from `at` on, `len` of them as far as there are so many.
    pub fn part(&self, at: u64, len: u64) -> Self {
        let (mut rest, mut part) = (self.clone(), Self::default());
        rest.advance(usize::try_from(at).unwrap_or(usize::MAX));
        let mut left = usize::try_from(len).unwrap_or(usize::MAX);
        for seg in rest.as_slice() {
            let take = seg.len.min(left);
            part.push(seg.addr as u64, take);
            left -= take;
        }
        part
    }

    /// Leaves bytes out from the front.
    #[inline]
    pub fn advance(&mut self, mut by: usize) {
        while let Some(seg) = self.list.as_mut_slice().get_mut(self.first) {
            if by < seg.len {
                seg.addr += by;
                seg.len -= by;
                return;
            }
            by -= seg.len;
            self.first += 1;
        }
    }
}

/// Why a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The initiator's memory is not accessible.
    Local,
    /// The target's memory is not accessible.
    Remote,
    /// The target process is gone.
    Gone,
    /// The kernel refuses access to the target.
    Refused(i32),
}

/// Direction of a copy, seen from the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Local to remote.
    Write,
    /// Remote to local.
    Read,
}

/// Reads a few bytes of another process, to see whether that is possible.
pub fn probe(pid: i32, addr: u64, into: &mut [u8]) -> io::Result<()> {
    let addr = usize::try_from(addr).map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: into.len() };
    // SAFETY: `local` covers `into`; the remote address is only used in the other process, by the kernel.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(n) {
        Ok(n) if n == into.len() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Copies between this process and `pid` (`None`: within this process). Both lists have the same total length and are
/// used up.
///
/// # Safety
/// Local segments (and, within one process, both) must lie in memory registered by the application or owned by the
/// caller, and stay mapped during the call: deregistration waits for running copies.
pub unsafe fn transfer(
    pid: Option<i32>,
    dir: Direction,
    local: &mut Segs,
    remote: &mut Segs,
) -> Result<(), Fault> {
    match (pid, dir) {
        (Some(pid), Direction::Write) => {
            remote.split_last_word();
            vm(pid, dir, local, remote)
        }
        (Some(pid), Direction::Read) => vm(pid, dir, local, remote),
        (None, Direction::Write) => {
            // SAFETY: passed on to the caller.
            unsafe { copy(local, remote) };
            Ok(())
        }
        (None, Direction::Read) => {
            // SAFETY: passed on to the caller.
            unsafe { copy(remote, local) };
            Ok(())
        }
    }
}

fn vm(pid: i32, dir: Direction, local: &mut Segs, remote: &mut Segs) -> Result<(), Fault> {
    loop {
        let (l, r) = (local.as_slice(), remote.as_slice());
        if l.is_empty() || r.is_empty() {
            return Ok(());
        }
        let (ln, rn) = (l.len() as libc::c_ulong, r.len() as libc::c_ulong);
        // SAFETY: `Seg` is laid out as `iovec`; the kernel validates every address on both sides and reports EFAULT.
        // What it writes locally on a READ is memory that the application registered for that.
        let n = unsafe {
            match dir {
                Direction::Write => {
                    libc::process_vm_writev(pid, l.as_ptr().cast(), ln, r.as_ptr().cast(), rn, 0)
                }
                Direction::Read => {
                    libc::process_vm_readv(pid, l.as_ptr().cast(), ln, r.as_ptr().cast(), rn, 0)
                }
            }
        };
        if let Ok(n) = usize::try_from(n) {
            let (want_l, want_r) = (local.total(), remote.total());
            if n >= want_l || n >= want_r {
                return Ok(());
            }
            if n == 0 {
                return Err(Fault::Remote);
            }
            local.advance(n);
            remote.advance(n);
            continue;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ESRCH) => return Err(Fault::Gone),
            Some(libc::EFAULT) => {
                let mut byte = [0];
                let there = probe(pid, r[0].addr as u64, &mut byte).is_ok();
                return Err(if there { Fault::Local } else { Fault::Remote });
            }
            Some(errno) => return Err(Fault::Refused(errno)),
            None => return Err(Fault::Remote),
        }
    }
}

/// Copies within the process. The last aligned word is stored after a fence.
///
/// # Safety
/// As [`transfer`].
unsafe fn copy(from: &mut Segs, to: &mut Segs) {
    to.split_last_word();
    loop {
        let (Some(f), Some(t)) = (from.as_slice().first().copied(), to.as_slice().first().copied())
        else {
            return;
        };
        let n = f.len.min(t.len);
        let src: *const u8 = std::ptr::with_exposed_provenance(f.addr);
        let dst: *mut u8 = std::ptr::with_exposed_provenance_mut(t.addr);
        if n == 8 && t.addr.is_multiple_of(8) {
            // SAFETY: the caller vouches for both ranges; the destination is aligned, the source need not be.
            unsafe {
                let word = src.cast::<u64>().read_unaligned();
                fence(Ordering::Release);
                AtomicU64::from_ptr(dst.cast()).store(word, Ordering::Release);
            }
        } else {
            // SAFETY: the caller vouches for both ranges; `copy` allows overlap, as a DMA engine does.
            unsafe { std::ptr::copy(src, dst, n) };
        }
        from.advance(n);
        to.advance(n);
    }
}

/// Replaces an 8-byte word of the target by `f` of it and returns the old value. The caller holds the device's
/// atomic lock, which makes this atomic among all requesters of the fabric.
///
/// # Safety
/// As [`transfer`]; `addr` is 8-byte aligned.
pub unsafe fn fetch_update(
    pid: Option<i32>,
    addr: usize,
    f: impl Fn(u64) -> u64,
) -> Result<u64, Fault> {
    if pid.is_none() {
        let word: *mut u64 = std::ptr::with_exposed_provenance_mut(addr);
        // SAFETY: the caller vouches for the range and its alignment.
        let word = unsafe { AtomicU64::from_ptr(word) };
        return match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(f(old))) {
            Ok(old) | Err(old) => Ok(old),
        };
    }
    let mut old = 0_u64;
    let mut target = Segs::default();
    target.push(addr as u64, 8);
    let mut here = Segs::default();
    here.push((&raw mut old).expose_provenance() as u64, 8);
    // SAFETY: the local word is this stack variable; the remote side is validated by the kernel.
    unsafe { transfer(pid, Direction::Read, &mut here, &mut target.clone())? };
    let new = f(old);
    let mut here = Segs::default();
    here.push((&raw const new).expose_provenance() as u64, 8);
    // SAFETY: as above.
    unsafe { transfer(pid, Direction::Write, &mut here, &mut target)? };
    Ok(old)
}

/// The content of checked local buffers.
pub fn gather(local: &Segs) -> Vec<u8> {
    let mut bytes = vec![0_u8; local.total()];
    let mut here = Segs::default();
    here.push(bytes.as_mut_ptr().expose_provenance() as u64, bytes.len());
    // SAFETY: the destination is this vector, as long as the source; the source was checked against our MR table (or is
    // inline data of the running post call) and the caller holds the send-queue lock that deregistration waits for.
    unsafe { copy(&mut local.clone(), &mut here) };
    bytes
}

/// Replaces the content of checked local buffers, which are as long as `bytes`.
pub fn store(bytes: &[u8], mut local: Segs) {
    let mut here = Segs::default();
    here.push(bytes.as_ptr().expose_provenance() as u64, bytes.len());
    // SAFETY: `copy` ends with the shorter side; the source is this slice, and the destination as in `gather`.
    unsafe { copy(&mut here, &mut local) };
}

/// Stores the result of an atomic into a checked local buffer of 8 bytes.
pub fn store_word(local: &mut Segs, word: u64) {
    let mut here = Segs::default();
    here.push((&raw const word).expose_provenance() as u64, 8);
    // SAFETY: the source is this stack variable; the destination was checked against our MR table and the caller
    // holds the send-queue lock that deregistration waits for.
    unsafe { copy(&mut here, local) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segs(list: &[(usize, usize)]) -> Segs {
        let mut segs = Segs::default();
        for (addr, len) in list {
            segs.push(*addr as u64, *len);
        }
        segs
    }

    #[test]
    fn last_aligned_word_is_an_element_of_its_own() {
        let mut s = segs(&[(0x1000, 24), (0x2004, 20)]);
        s.split_last_word();
        let parts: Vec<_> = s.as_slice().iter().map(|s| (s.addr, s.len)).collect();
        assert_eq!(parts, [(0x1000, 24), (0x2004, 12), (0x2010, 8)]);
        let mut odd = segs(&[(0x1001, 24)]);
        odd.split_last_word();
        assert_eq!(odd.as_slice().len(), 1);
    }

    #[test]
    fn advance_keeps_the_right_bytes() {
        let mut s = segs(&[(100, 10), (200, 10), (300, 10)]);
        s.advance(12);
        assert_eq!((s.as_slice()[0].addr, s.total()), (202, 18));
        s.advance(8);
        assert_eq!((s.as_slice()[0].addr, s.total()), (300, 10));
        s.advance(10);
        assert!(s.as_slice().is_empty());
    }

    #[test]
    fn copies_differently_cut_lists_within_and_across_the_syscall() {
        let src: Vec<u8> = (0..100).collect();
        for pid in [None, Some(std::process::id().cast_signed())] {
            let mut dst = vec![0_u8; 100];
            let base = src.as_ptr() as usize;
            let to = dst.as_mut_ptr() as usize;
            let mut local = segs(&[(base, 33), (base + 33, 67)]);
            let mut remote = segs(&[(to, 70), (to + 70, 30)]);
            // SAFETY: both lists lie inside the two vectors.
            unsafe { transfer(pid, Direction::Write, &mut local, &mut remote) }.expect("copy");
            assert_eq!(src, dst);
        }
    }

    #[test]
    fn faults_name_the_side() {
        let pid = Some(std::process::id().cast_signed());
        let mut word = 0_u64;
        let good = segs(&[((&raw mut word) as usize, 8)]);
        let bad = segs(&[(16, 8)]);
        // SAFETY: the bad list is only touched by the kernel, which refuses it.
        let (local, remote) = unsafe {
            (
                transfer(pid, Direction::Write, &mut bad.clone(), &mut good.clone()),
                transfer(pid, Direction::Write, &mut good.clone(), &mut bad.clone()),
            )
        };
        assert_eq!(local, Err(Fault::Local));
        assert_eq!(remote, Err(Fault::Remote));
    }
}
