//! Names of glibc in the versions that older releases have, so that a file built on a new distribution loads on an old one.
//!
//! glibc 2.34 moved libpthread and libdl into libc and gave their names that version; 2.33 did so with the `stat` family,
//! which had been inline functions before; `gettid` came with 2.30. A reference takes the newest version that is there when
//! it is linked, although the older ones do the same. Here each such name is a function of this file that goes on to the old
//! version; it is hidden, so that nobody else in the process finds it. Going on is a jump: the caller stays the one that
//! `dlopen` and `dlsym` look at.
//!
//! `release/stage` states the version that comes out, and `release/floor` ends a release that needs a newer one.
//! `build.rs` names the libraries that have the old names on old systems; since 2.34 they are empty. Other architectures have
//! but one version of the old names.

#![cfg(all(
    target_os = "linux",
    target_env = "gnu",
    target_arch = "x86_64",
    target_pointer_width = "64"
))]

/// A function that goes on to a version of a name.
macro_rules! old {
    ($name:literal, $version:literal) => {
        core::arch::global_asm!(
            concat!(".symver pinrail_old_", $name, ", ", $name, "@GLIBC_", $version),
            ".text",
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            concat!("jmp pinrail_old_", $name, "@PLT"),
            concat!(".size ", $name, ", . - ", $name),
        );
    };
}

old!("dladdr", "2.2.5");
old!("dlclose", "2.2.5");
old!("dlerror", "2.2.5");
old!("dlopen", "2.2.5");
old!("dlsym", "2.2.5");
old!("dlvsym", "2.2.5");
old!("pthread_create", "2.2.5");
old!("pthread_join", "2.2.5");
old!("pthread_key_create", "2.2.5");
old!("pthread_key_delete", "2.2.5");
old!("pthread_setspecific", "2.2.5");
old!("pthread_sigmask", "2.2.5");
old!("pthread_setname_np", "2.12");

/// A function that is a system call, by glibc's `syscall`, which sets errno. Weak, as std refers to one of them that way.
macro_rules! call {
    ($name:literal, $($line:literal),+) => {
        core::arch::global_asm!(
            ".text",
            concat!(".weak ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            $($line,)+
            "xor eax, eax",
            "jmp syscall@PLT",
            concat!(".size ", $name, ", . - ", $name),
        );
    };
}

// The kernel's structure is that of glibc on this architecture. SYS_stat, SYS_fstat, SYS_newfstatat and SYS_gettid.
call!("stat64", "mov rdx, rsi", "mov rsi, rdi", "mov edi, 4");
call!("fstat64", "mov rdx, rsi", "movsxd rsi, edi", "mov edi, 5");
call!(
    "fstatat64",
    "movsxd r8, ecx",
    "mov rcx, rdx",
    "mov rdx, rsi",
    "movsxd rsi, edi",
    "mov edi, 262"
);
call!("gettid", "mov edi, 186");
