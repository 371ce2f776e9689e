//! One of the processes of a case: the plugin in it, and the way to the other process.

use super::cases::Case;
use super::end::{Receiver, Sender};
use super::{Outcome, Part, Said};
use pinrail_client::failure::{Failure, Result};
use pinrail_client::net::abi::HANDLE_BYTES;
use pinrail_client::net::library::Library;
use pinrail_client::net::{Listener, Net, RecvComm, SendComm, log};
use pinrail_client::worker::Service;
use std::cell::RefCell;
use std::path::Path;

/// Room for a handle, and for what must not be written behind it.
pub const HANDLE_ROOM: usize = 2 * HANDLE_BYTES;

/// A process.
#[derive(Debug)]
pub struct Side {
    service: RefCell<Service>,
    part: Part,
    net: Option<Net>,
}

impl Side {
    /// Not loaded yet.
    pub fn new(service: Service, part: Part, verbose: bool) -> Self {
        if verbose {
            log::configure(&format!("{} {}: ", part.case, part.rank), true);
        } else {
            log::keep_quiet();
        }
        Self { service: RefCell::new(service), part, net: None }
    }

    /// Loads the plugin, plays the case and unloads it, once the other process is through as well.
    pub fn run(&mut self, case: &Case) -> Result<Outcome> {
        self.step("dlopen and init")?;
        self.net = Some(self.load()?);
        let outcome = (case.play)(self)?;
        if case.processes == 2 && !case.one_dies {
            self.step("waiting for the other process's end")?;
            self.meet()?;
        }
        self.step("finalize and dlclose")?;
        self.close()?;
        Ok(outcome)
    }

    /// Loads and initialises the plugin once more.
    pub fn load(&self) -> Result<Net> {
        let mut net =
            Net::load(Library::open(Path::new(&self.part.plugin))?, Some(self.part.version))?;
        net.init()?;
        Ok(net)
    }

    /// Closes the plugin, if it is open.
    pub fn close(&mut self) -> Result<()> {
        self.net.take().map_or(Ok(()), Net::close)
    }

    /// The plugin.
    pub fn net(&self) -> Result<&Net> {
        self.net.as_ref().ok_or_else(|| Failure::new("case", "the plugin is closed"))
    }

    /// The table.
    pub fn version(&self) -> u8 {
        self.part.version
    }

    /// The device.
    pub fn device(&self) -> i32 {
        self.part.device
    }

    /// This process sends; the other receives.
    pub fn sends(&self) -> bool {
        self.part.rank == 0
    }

    /// Says something to the command.
    pub fn say(&self, said: &Said) -> Result<()> {
        self.service.borrow_mut().answer(said).map(drop)
    }

    /// Names what is about to be done.
    pub fn step(&self, what: &str) -> Result<()> {
        self.say(&Said::Step(what.to_owned()))
    }

    /// Says something to the other process.
    pub fn tell(&self, bytes: &[u8]) -> Result<()> {
        self.say(&Said::Tell(bytes.to_owned()))
    }

    /// What the other process says, waiting for it.
    pub fn hear(&self) -> Result<Vec<u8>> {
        let heard = self.service.borrow_mut().command()?;
        heard.ok_or_else(|| Failure::new("case", "the command is gone"))
    }

    /// Waits until both processes are here.
    pub fn meet(&self) -> Result<()> {
        self.tell(b"here")?;
        self.hear().map(drop)
    }

    /// Dies without a word to anybody but the command.
    pub fn die(&self) -> Result<Outcome> {
        self.say(&Said::Dying)?;
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL)
            .map_err(|error| Failure::io("case", "kill", &error.into()))?;
        loop {
            std::thread::park();
        }
    }

    /// Listens; the handle with room behind it.
    pub fn listen(&self) -> Result<(Listener, Vec<u8>)> {
        self.step("listen")?;
        let mut handle = vec![0; HANDLE_ROOM];
        let listener = self.net()?.listen_into(self.device(), &mut handle)?;
        Ok((listener, handle))
    }

    /// Connects, polling.
    pub fn connect(&self, handle: &mut [u8]) -> Result<SendComm> {
        self.step("connect")?;
        loop {
            if let Some(comm) = self.net()?.connect(self.device(), handle)? {
                return Ok(comm);
            }
            std::thread::yield_now();
        }
    }

    /// Accepts, polling, and closes the listener, as NCCL does at once.
    pub fn accept(&self, listener: Listener) -> Result<RecvComm> {
        self.step("accept")?;
        loop {
            if let Some(comm) = self.net()?.accept(listener)? {
                self.step("closeListen")?;
                self.net()?.close_listener(listener)?;
                return Ok(comm);
            }
            std::thread::yield_now();
        }
    }

    /// The sending end of a new connection to the other process, with `room` bytes of registered memory.
    pub fn sender(&self, room: usize) -> Result<Sender<'_>> {
        let mut handle = self.hear()?;
        handle.resize(HANDLE_ROOM, 0);
        let comm = self.connect(&mut handle)?;
        self.step("regMr of a sending end")?;
        Sender::new(self, comm, room)
    }

    /// The receiving end of it.
    pub fn receiver(&self, room: usize) -> Result<Receiver<'_>> {
        let (listener, handle) = self.listen()?;
        self.tell(&handle[..HANDLE_BYTES])?;
        let comm = self.accept(listener)?;
        self.step("regMr of a receiving end")?;
        Receiver::new(self, comm, room)
    }

    /// Most members of a receive, as the plugin says.
    pub fn most_members(&self) -> Result<usize> {
        let most = self.net()?.properties(self.device())?.max_recvs;
        Ok(usize::try_from(most).unwrap_or(1).clamp(1, pinrail_client::net::ONE_RECEIVE))
    }
}
