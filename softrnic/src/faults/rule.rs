//! One rule of a fault plan: which requests it is about, when it fires among them, and what happens then.

/// Opcodes by name, in the order of their codes, then calls that make something.
pub const OPS: [&str; 11] = [
    "write",
    "write-imm",
    "send",
    "send-imm",
    "read",
    "cmp-swap",
    "fetch-add",
    "reg-mr",
    "create-qp",
    "create-cq",
    "alloc-pd",
];
/// Bit of a registration in [`Match::ops`].
pub const REG_MR: u16 = 1 << 7;
/// Bit of a queue pair that is made.
pub const CREATE_QP: u16 = 1 << 8;
/// Bit of a completion queue that is made.
pub const CREATE_CQ: u16 = 1 << 9;
/// Bit of a protection domain that is made.
pub const ALLOC_PD: u16 = 1 << 10;
/// Bits of all calls that make something.
pub const CALLS: u16 = REG_MR | CREATE_QP | CREATE_CQ | ALLOC_PD;
/// Bits of all send requests.
pub const REQUESTS: u16 = 0x7f;
/// Bits of the requests that write into a place that the sender names.
pub const WRITES: u16 = 0b11;
/// Bits of the requests whose payload can be changed on its way.
pub const PAYLOADS: u16 = 0b1_1111;

/// Words of a rule in shared memory.
pub const WORDS: usize = 12;

/// Whose view of a request a rule takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Requests that the rule's process posts.
    Local,
    /// Requests that arrive at queue pairs of the rule's process.
    Remote,
}

/// How far a request gets before the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Nothing of it happened.
    Start,
    /// The first half of its payload is in place (WRITEs only).
    Half,
    /// All of its payload is in place, no receive is consumed (WRITEs only).
    Payload,
    /// The receiver has all of it, its completion included.
    End,
}

/// Names of [`Stage`], in its order.
pub const STAGES: [&str; 4] = ["start", "half", "payload", "end"];

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpMatch {
    /// By number.
    Number(u32),
    /// By order of creation, from 1.
    Ordinal(u32),
}

/// Which requests a rule is about, and which of them it picks.
#[derive(Clone, Debug, PartialEq)]
pub struct Match {
    /// Device ordinal.
    pub device: Option<u8>,
    /// Port number.
    pub port: Option<u8>,
    /// Queue pair.
    pub qp: Option<QpMatch>,
    /// Bits of the opcodes.
    pub ops: u16,
    /// Side.
    pub side: Side,
    /// Smallest and largest payload, region or depth.
    pub bytes: (u64, u64),
    /// Leaves out this many matching requests.
    pub skip: u64,
    /// Then picks every n-th.
    pub every: u64,
    /// Fires at most this often.
    pub times: u64,
    /// Leaves out what is posted within so many nanoseconds from the first request that met the plan.
    pub quiet_ns: u64,
    /// Then picks with this probability.
    pub p: f64,
}

impl Default for Match {
    /// Every send request of this process.
    fn default() -> Self {
        Self {
            device: None,
            port: None,
            qp: None,
            ops: REQUESTS,
            side: Side::Local,
            bytes: (0, u64::MAX),
            skip: 0,
            every: 1,
            times: u64::MAX,
            quiet_ns: 0,
            p: 1.0,
        }
    }
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The request completes with this status.
    Status {
        /// Status code.
        status: u8,
        /// `vendor_err`, unless softrnic chooses.
        vendor: Option<u32>,
    },
    /// The request, or with a later stage its acknowledgement, is lost until the retries are used up.
    Drop,
    /// The request waits so many nanoseconds, and with it those behind it on its queue pair.
    Delay {
        /// Nanoseconds.
        ns: u64,
    },
    /// The request waits until other queue pairs of the process have done this many, or for a time.
    Behind {
        /// Requests.
        count: u32,
        /// At most so many nanoseconds.
        ns: u64,
    },
    /// The payload is copied in pieces of this size in random order; 0 = the path MTU.
    Shuffle {
        /// Bytes.
        piece: u32,
    },
    /// So many bytes of the payload arrive changed.
    Corrupt {
        /// Bytes.
        bytes: u32,
    },
    /// The queue pair of the rule's side goes to the error state with QP_FATAL.
    KillQp,
    /// The completion queue of the rule's side overruns: CQ_ERR, and no completion arrives in it any more.
    CqOverrun,
    /// The port of the rule's side goes down, for a time or until somebody takes it up.
    PortDown {
        /// Nanoseconds.
        ns: Option<u64>,
    },
    /// A GID table entry of that port changes.
    Gid {
        /// Index.
        index: u8,
        /// New address.
        gid: [u8; 16],
    },
    /// The device of the rule's side dies.
    DeviceFatal,
    /// The call fails.
    Fail {
        /// errno.
        errno: u16,
    },
}

/// A rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Which requests.
    pub when: Match,
    /// How far they get.
    pub stage: Stage,
    /// What happens.
    pub action: Action,
}

/// What is known about a request when the rules are asked.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Whose rules are asked.
    pub side: Side,
    /// Device ordinal on that side.
    pub device: u8,
    /// Port on that side; 0 for a call.
    pub port: u8,
    /// Number of the queue pair on that side.
    pub qpn: u32,
    /// Its ordinal.
    pub ordinal: u32,
    /// Bit of the opcode.
    pub op: u16,
    /// Bytes of payload or region; entries of the larger queue of what is made.
    pub bytes: u64,
}

impl Match {
    /// Whether a request is one of those that the rule counts.
    pub fn covers(&self, facts: &Facts) -> bool {
        self.side == facts.side
            && self.ops & facts.op != 0
            && self.device.is_none_or(|d| d == facts.device)
            && self.port.is_none_or(|p| p == facts.port)
            && (self.bytes.0..=self.bytes.1).contains(&facts.bytes)
            && match self.qp {
                None => true,
                Some(QpMatch::Number(n)) => n == facts.qpn,
                Some(QpMatch::Ordinal(n)) => n == facts.ordinal,
            }
    }

    /// Whether the `n`-th (from 1) of those is picked by its position.
    pub fn picks(&self, n: u64) -> bool {
        n > self.skip && (n - self.skip - 1).is_multiple_of(self.every.max(1))
    }
}

fn byte(word: u64, shift: u32) -> u8 {
    u8::try_from(word >> shift & 0xff).unwrap_or(0)
}

fn low(word: u64) -> u32 {
    u32::try_from(word & 0xffff_ffff).unwrap_or(0)
}

impl Rule {
    /// The rule as it lies in shared memory.
    pub fn words(&self) -> [u64; WORDS] {
        const SET: u64 = 1 << 32;
        let (tag, a, b, c) = match self.action {
            Action::Status { status, vendor } => {
                (0, u64::from(status), vendor.map_or(0, |v| SET | u64::from(v)), 0)
            }
            Action::Drop => (1, 0, 0, 0),
            Action::Delay { ns } => (2, ns, 0, 0),
            Action::Behind { count, ns } => (3, u64::from(count), ns, 0),
            Action::Shuffle { piece } => (4, u64::from(piece), 0, 0),
            Action::Corrupt { bytes } => (5, u64::from(bytes), 0, 0),
            Action::KillQp => (6, 0, 0, 0),
            Action::CqOverrun => (7, 0, 0, 0),
            Action::PortDown { ns } => (8, ns.unwrap_or(0), u64::from(ns.is_some()), 0),
            Action::Gid { index, gid } => {
                let half = |o: usize| u64::from_ne_bytes(std::array::from_fn(|i| gid[o + i]));
                (9, u64::from(index), half(0), half(8))
            }
            Action::DeviceFatal => (10, 0, 0, 0),
            Action::Fail { errno } => (11, u64::from(errno), 0, 0),
        };
        let w = &self.when;
        let head = tag
            | (self.stage as u64) << 8
            | u64::from(w.side == Side::Remote) << 16
            | u64::from(w.device.unwrap_or(0xff)) << 32
            | u64::from(w.port.unwrap_or(0)) << 40
            | u64::from(w.ops) << 48;
        let qp = match w.qp {
            None => 0,
            Some(QpMatch::Number(n)) => 1 << 32 | u64::from(n),
            Some(QpMatch::Ordinal(n)) => 2 << 32 | u64::from(n),
        };
        let (least, most) = w.bytes;
        [head, qp, least, most, w.skip, w.every, w.times, w.quiet_ns, w.p.to_bits(), a, b, c]
    }

    /// Reads a rule from shared memory; `None` if nobody of ours can have written it.
    pub fn from_words(w: &[u64; WORDS]) -> Option<Self> {
        let (a, b, c) = (w[9], w[10], w[11]);
        let action = match byte(w[0], 0) {
            0 => {
                let status = u8::try_from(a).ok().filter(|s| (1..=23).contains(s))?;
                Action::Status { status, vendor: (b >> 32 != 0).then(|| low(b)) }
            }
            1 => Action::Drop,
            2 => Action::Delay { ns: a },
            3 => Action::Behind { count: low(a), ns: b },
            4 => Action::Shuffle { piece: low(a) },
            5 => Action::Corrupt { bytes: low(a) },
            6 => Action::KillQp,
            7 => Action::CqOverrun,
            8 => Action::PortDown { ns: (b != 0).then_some(a) },
            9 => {
                let mut gid = [0; 16];
                gid[..8].copy_from_slice(&b.to_ne_bytes());
                gid[8..].copy_from_slice(&c.to_ne_bytes());
                Action::Gid { index: u8::try_from(a).ok()?, gid }
            }
            10 => Action::DeviceFatal,
            11 => Action::Fail { errno: u16::try_from(a).ok()? },
            _ => return None,
        };
        let stage = match byte(w[0], 8) {
            0 => Stage::Start,
            1 => Stage::Half,
            2 => Stage::Payload,
            3 => Stage::End,
            _ => return None,
        };
        let when = Match {
            device: Some(byte(w[0], 32)).filter(|d| *d != 0xff),
            port: Some(byte(w[0], 40)).filter(|p| *p != 0),
            qp: match w[1] >> 32 {
                0 => None,
                1 => Some(QpMatch::Number(low(w[1]))),
                2 => Some(QpMatch::Ordinal(low(w[1]))),
                _ => return None,
            },
            ops: (w[0] >> 48) as u16 & (REQUESTS | CALLS),
            side: if byte(w[0], 16) == 0 { Side::Local } else { Side::Remote },
            bytes: (w[2], w[3]),
            skip: w[4],
            every: w[5],
            times: w[6],
            quiet_ns: w[7],
            p: Some(f64::from_bits(w[8])).filter(|p| (0.0..=1.0).contains(p))?,
        };
        Some(Self { when, stage, action })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        side: Side::Local,
        device: 1,
        port: 2,
        qpn: 0x1_0005,
        ordinal: 3,
        op: 1,
        bytes: 4096,
    };

    #[test]
    fn every_matcher_alone_includes_and_excludes() {
        let all = Match::default;
        let cases: [(&str, Match, Match); 7] = [
            ("device", Match { device: Some(1), ..all() }, Match { device: Some(0), ..all() }),
            ("port", Match { port: Some(2), ..all() }, Match { port: Some(1), ..all() }),
            (
                "number",
                Match { qp: Some(QpMatch::Number(0x1_0005)), ..all() },
                Match { qp: Some(QpMatch::Number(3)), ..all() },
            ),
            (
                "ordinal",
                Match { qp: Some(QpMatch::Ordinal(3)), ..all() },
                Match { qp: Some(QpMatch::Ordinal(0x1_0005)), ..all() },
            ),
            ("op", Match { ops: WRITES, ..all() }, Match { ops: REG_MR, ..all() }),
            ("side", all(), Match { side: Side::Remote, ..all() }),
            ("bytes", Match { bytes: (4096, 4096), ..all() }, Match { bytes: (0, 4095), ..all() }),
        ];
        for (name, yes, no) in cases {
            assert!(yes.covers(&FACTS), "{name} includes");
            assert!(!no.covers(&FACTS), "{name} excludes");
        }
        assert!(!Match { bytes: (4097, u64::MAX), ..all() }.covers(&FACTS));
    }

    #[test]
    fn positions_are_counted_from_one() {
        let picked = |skip, every| {
            let when = Match { skip, every, ..Match::default() };
            (1..10).filter(|n| when.picks(*n)).collect::<Vec<u64>>()
        };
        assert_eq!(picked(0, 1), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(picked(6, 1), [7, 8, 9]);
        assert_eq!(picked(0, 3), [1, 4, 7]);
        assert_eq!(picked(2, 3), [3, 6, 9]);
    }

    #[test]
    fn scribbled_words_are_no_rule() {
        let good = Rule { when: Match::default(), stage: Stage::Start, action: Action::Drop };
        assert_eq!(Rule::from_words(&good.words()), Some(good.clone()));
        for (index, value) in [(0, 99), (0, 1 | 9 << 8), (1, 7 << 32), (8, u64::MAX)] {
            let mut words = good.words();
            words[index] = value;
            assert_eq!(Rule::from_words(&words), None, "word {index} = {value:#x}");
        }
    }
}
