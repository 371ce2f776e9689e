//! The entry of the `softrnic` command. `link.sh` makes a program of it; the library does not export it.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::io::{ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt;

use super::guard;
use crate::command::{Failure, USAGE, run};

fn write(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Runs the command with the arguments of `main` and returns its exit status: 0, 1 for what could not be done, 2 for what
/// was not understood.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_main(count: c_int, words: *const *const c_char) -> c_int {
    guard(1, || {
        let words: Vec<OsString> = (1..usize::try_from(count).unwrap_or(0))
            .map(|i| {
                // SAFETY: the arguments of main: `count` strings, each NUL-terminated, alive as long as the process.
                let word = unsafe { CStr::from_ptr(words.add(i).read()) };
                OsStr::from_bytes(word.to_bytes()).to_owned()
            })
            .collect();
        match run(&words) {
            // Whoever closed the pipe does not want the rest.
            Ok(text) => match write(&text) {
                Ok(()) => 0,
                Err(error) if error.kind() == ErrorKind::BrokenPipe => 1,
                Err(error) => {
                    eprintln!("softrnic: ERROR the answer cannot be written: {error}");
                    1
                }
            },
            Err(Failure::Refused(why)) => {
                eprintln!("softrnic: ERROR {why}");
                1
            }
            Err(Failure::Usage(why)) => {
                eprint!("softrnic: ERROR {why}\n\n{USAGE}");
                2
            }
        }
    })
}
