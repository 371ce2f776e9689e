//! Time for the data path: a counter of the processor, read by one instruction. What its ticks are in nanoseconds is found
//! elsewhere, by whoever wants to know, from pairs of both clocks.

/// Ticks of the processor's counter, which goes at the same pace on all cores where [`is_steady`] says so.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every processor of this architecture has the instruction; where a process may not use it, which nobody
        // asks for without meaning it, clocks of the C library fail too.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: reads a register that Linux lets every process read, and nothing else.
        unsafe {
            core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags));
        }
        ticks
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    nanos()
}

/// Whether the counter keeps its pace whatever the processor does. If not, latencies are estimates.
pub fn is_steady() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__cpuid;
        const POWER: u32 = 0x8000_0007;
        const INVARIANT: u32 = 1 << 8;
        __cpuid(0x8000_0000).eax >= POWER && __cpuid(POWER).edx & INVARIANT != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Nanoseconds of CLOCK_MONOTONIC, which other processes of the machine read alike.
pub fn nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid out-pointer; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_clocks_go_forward() {
        let (before, start) = (ticks(), nanos());
        while nanos() - start < 1_000_000 {}
        assert!(ticks() > before);
    }
}
