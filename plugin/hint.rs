//! Two hints for the compiler, which stand for no instruction. Both keep it from an improvement that is none on the data path,
//! where what is usual is known and jumps to what is not are never taken.

/// Keeps two tests apart that the compiler would make one of: to put both answers into registers and join them takes more
/// instructions than a second jump.
#[inline(always)]
pub fn apart() {
    // SAFETY: no instruction, and nothing is touched.
    unsafe { core::arch::asm!("", options(nomem, nostack, preserves_flags)) };
}

/// The same number, of which the compiler does not know how it came about: what is computed from it is computed as it stands
/// there, so that a test can use what the computation leaves behind.
#[inline(always)]
pub fn plain(mut number: usize) -> usize {
    // SAFETY: no instruction; the register keeps what it has.
    unsafe {
        core::arch::asm!("/* {0} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags));
    }
    number
}
