//! A folder that may be turned off.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::value::{Form, Reading, Refused, Value};

/// The word for none.
const OFF: &str = "off";

/// A folder by its absolute path, or none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Folder(Option<PathBuf>);

impl Folder {
    /// The path; `None`: turned off.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }
}

impl Value for Folder {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        if text.eq_ignore_ascii_case(OFF) {
            return Ok(Reading::exact(Self(None)));
        }
        // A relative one would depend on where the program happens to be.
        let path = PathBuf::from(text);
        if path.is_absolute() { Ok(Reading::exact(Self(Some(path)))) } else { Err(Refused) }
    }
    fn show(&self, _: &Form) -> String {
        self.0.as_ref().map_or_else(|| OFF.to_owned(), |path| path.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_or_none() {
        let read = |text| Folder::read(OsStr::new(text), &Form::Flag);
        assert_eq!(read("OFF").unwrap().value.path(), None);
        assert_eq!(read("/dev/shm").unwrap().value.path(), Some(Path::new("/dev/shm")));
        for bad in ["", "relative", "./off"] {
            assert_eq!(read(bad), Err(Refused), "{bad}");
        }
        for text in ["off", "/a b/c"] {
            assert_eq!(read(text).unwrap().value.show(&Form::Flag), text);
        }
    }
}
