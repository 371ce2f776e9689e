//! Registered memory of the plugin for one purpose: a mapping of its own, or a piece of the arena where such a mapping
//! cannot be registered.

use super::arena::{Arena, Lease};
use super::ledger::Purpose;
use super::page::PageOwned;
use super::registry::{Registered, Registry, register_owned};
use crate::error::Result;
use crate::sync::{AtomicU32, AtomicU64};
use crate::verbs::mr::Access;
use std::ptr::NonNull;
use std::sync::Arc;

/// The memory; its registrations are kept beside it and must end before it does.
#[derive(Debug)]
pub struct Piece {
    pages: Arc<PageOwned>,
    offset: usize,
    lease: Option<Lease>,
}

impl Piece {
    /// A mapping of at least `len` bytes that no device sees.
    ///
    /// # Errors
    /// No memory.
    pub fn unregistered(len: usize, purpose: Purpose) -> Result<Arc<Self>> {
        let pages = Arc::new(PageOwned::new(len, purpose)?);
        Ok(Arc::new(Self { pages, offset: 0, lease: None }))
    }

    /// At least `len` bytes of zeroes, registered with these devices in their order. `arena`: where it may come from
    /// if a fresh mapping cannot be pinned.
    ///
    /// # Errors
    /// A verb fails, and so does what the arena tried, if it was allowed to.
    pub fn registered(
        len: usize,
        purpose: Purpose,
        access: Access,
        registries: &[Arc<Registry>],
        arena: Option<&Arc<Arena>>,
    ) -> Result<(Arc<Self>, Vec<Arc<Registered>>)> {
        let own = || {
            let pages = Arc::new(PageOwned::new(len, purpose)?);
            let registered = register_owned(&pages, registries, access)?;
            Ok((Arc::new(Self { pages, offset: 0, lease: None }), registered))
        };
        own().or_else(|e: crate::error::Error| {
            let Some(arena) = arena.filter(|_| e.errno() == Some(libc::ENOMEM)) else {
                return Err(e);
            };
            // What failed first is the better explanation.
            let Ok(lease) = arena.lend(len, registries) else { return Err(e) };
            tracing::info!("{e}; {purpose} come from memory that was pinned before");
            let pages = Arc::clone(lease.pages());
            let offset = lease.offset();
            pages.clear(offset, lease.len());
            let registered = lease.registered().to_vec();
            Ok((Arc::new(Self { pages, offset, lease: Some(lease) }), registered))
        })
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.pages.addr() + self.offset
    }

    /// The first byte; good for as long as this lives.
    pub fn base(&self) -> NonNull<u8> {
        self.pages.place(self.offset, 0)
    }

    /// Bytes that are there from the first on.
    pub fn len(&self) -> usize {
        self.lease.as_ref().map_or(self.pages.len(), Lease::len)
    }

    /// Whether there are none; never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The aligned 32-bit word at `offset`.
    ///
    /// # Panics
    /// As [`PageOwned::u32_at`].
    #[inline]
    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        self.pages.u32_at(self.offset + offset)
    }

    /// The aligned 64-bit word at `offset`.
    ///
    /// # Panics
    /// As [`PageOwned::u64_at`].
    #[inline]
    pub fn u64_at(&self, offset: usize) -> &AtomicU64 {
        self.pages.u64_at(self.offset + offset)
    }
}
