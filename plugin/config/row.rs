//! The shape of the settings table, and the macro that turns one declaration per setting into the
//! struct, its defaults, the table and the code that reads and shows values.

use super::value::Form;

/// One variable that has an effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Name of the variable.
    pub name: &'static str,
    /// What it accepts.
    pub form: Form,
    /// Text of the default; empty means "not set".
    pub default: &'static str,
    /// The stock transport's default, where it differs.
    pub stock_default: Option<&'static str>,
    /// What it does.
    pub prose: &'static str,
}

impl Row {
    /// The variable is one of NCCL's.
    pub fn is_stock(&self) -> bool {
        self.name.starts_with("NCCL_")
    }
}

/// One variable that is accepted and has no effect in the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inert {
    /// Name of the variable.
    pub name: &'static str,
    /// Stock default; empty means "not set".
    pub default: &'static str,
    /// Why it has no effect here.
    pub reason: &'static str,
    /// NCCL's core acts on it whatever the transport is, so that setting it is in order.
    pub core: bool,
}

/// Declares the settings. Each is written
/// `/// prose` `field: Type = "VARIABLE", form, default "text" [, stock "text"];`.
macro_rules! settings {
    ($(
        $(#[doc = $prose:literal])+
        $field:ident: $ty:ty = $name:literal, $form:expr, default $default:literal
        $(, stock $stock:literal)?;
    )+) => {
        /// The effective settings of the plugin, one plain field per variable.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Settings {
            $(
                $(#[doc = $prose])+
                ///
                #[doc = concat!("Variable `", $name, "`.")]
                pub $field: $ty,
            )+
            /// The variables that were set and have an effect, in the order of the table.
            pub given: Vec<Given>,
        }

        impl Default for Settings {
            fn default() -> Self {
                Self {
                    $( $field: <$ty as Value>::read(OsStr::new($default), &$form)
                        .map_or_else(|_| <$ty>::default(), |reading| reading.value), )+
                    given: Vec::new(),
                }
            }
        }

        /// Every variable that has an effect.
        pub static TABLE: &[Row] = &[$(
            Row {
                name: $name,
                form: $form,
                default: $default,
                stock_default: settings!(@stock $($stock)?),
                prose: concat!($($prose),+),
            },
        )+];

        impl Settings {
            /// Gives a variable a value. `None`: no such variable.
            pub(super) fn assign(
                &mut self,
                name: &str,
                text: &OsStr,
            ) -> Option<Result<Reading<()>, Refused>> {
                match name {
                    $( $name => Some(<$ty as Value>::read(text, &$form).map(|reading| {
                        self.$field = reading.value;
                        Reading { value: (), clamped: reading.clamped, remarks: reading.remarks }
                    })), )+
                    _ => None,
                }
            }

            /// The effective value of a variable as text; `None`: no such variable.
            pub fn shown(&self, name: &str) -> Option<String> {
                match name {
                    $( $name => Some(Value::show(&self.$field, &$form)), )+
                    _ => None,
                }
            }
        }
    };
    (@stock) => { None };
    (@stock $stock:literal) => { Some($stock) };
}
pub(super) use settings;
