//! The RC state machine: which transitions exist, and which attributes each demands and allows.

use crate::abi::*;

/// Attributes of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Must be given.
    pub required: u32,
    /// May be given.
    pub optional: u32,
}

const NONE: Rule = Rule { required: 0, optional: 0 };
const MOVES: u32 =
    QP_CUR_STATE | QP_ALT_PATH | QP_ACCESS_FLAGS | QP_MIN_RNR_TIMER | QP_PATH_MIG_STATE;

/// The rule of an RC transition; `None` if it does not exist.
pub fn rule(from: u32, to: u32) -> Option<Rule> {
    let init = QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
    Some(match (from, to) {
        (QPS_RESET..=QPS_ERR, QPS_RESET | QPS_ERR) => NONE,
        (QPS_RESET, QPS_INIT) => Rule { required: init, optional: 0 },
        (QPS_INIT, QPS_INIT) => Rule { required: 0, optional: init },
        (QPS_INIT, QPS_RTR) => Rule {
            required: QP_AV
                | QP_PATH_MTU
                | QP_DEST_QPN
                | QP_RQ_PSN
                | QP_MAX_DEST_RD_ATOMIC
                | QP_MIN_RNR_TIMER,
            optional: QP_ALT_PATH | QP_ACCESS_FLAGS | QP_PKEY_INDEX,
        },
        (QPS_RTR, QPS_RTS) => Rule {
            required: QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC,
            optional: MOVES,
        },
        (QPS_RTS, QPS_RTS) | (QPS_SQD, QPS_RTS) => Rule { required: 0, optional: MOVES },
        (QPS_RTS, QPS_SQD) => Rule { required: 0, optional: QP_EN_SQD_ASYNC_NOTIFY },
        (QPS_SQD, QPS_SQD) => Rule {
            required: 0,
            optional: QP_PORT
                | QP_AV
                | QP_TIMEOUT
                | QP_RETRY_CNT
                | QP_RNR_RETRY
                | QP_MAX_QP_RD_ATOMIC
                | QP_MAX_DEST_RD_ATOMIC
                | QP_ALT_PATH
                | QP_ACCESS_FLAGS
                | QP_PKEY_INDEX
                | QP_MIN_RNR_TIMER
                | QP_PATH_MIG_STATE,
        },
        _ => return None,
    })
}

/// Checks a transition and its attribute mask.
pub fn check_mask(from: u32, to: u32, mask: u32) -> Result<(), i32> {
    let rule = rule(from, to).ok_or(libc::EINVAL)?;
    let given = mask & !QP_STATE;
    let complete = given & rule.required == rule.required;
    let allowed = given & !(rule.required | rule.optional) == 0;
    if complete && allowed { Ok(()) } else { Err(libc::EINVAL) }
}

/// Limits that attribute values are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Ports of the device.
    pub ports: u8,
    /// P_Key table length.
    pub pkeys: usize,
    /// GID table length.
    pub gids: usize,
    /// Largest MTU code.
    pub mtu: u32,
    /// Largest READ/ATOMIC depth.
    pub rd_atom: u8,
    /// Whether the link layer is Ethernet.
    pub ethernet: bool,
}

/// Checks the values of the given attributes.
pub fn check_values(attr: &QpAttr, mask: u32, limits: &Limits) -> Result<(), i32> {
    let access =
        ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
    let port_ok = |port: u8| port >= 1 && port <= limits.ports;
    let ah = &attr.ah_attr;
    let checks = [
        (QP_PORT, port_ok(attr.port_num)),
        (QP_PKEY_INDEX, usize::from(attr.pkey_index) < limits.pkeys),
        (QP_ACCESS_FLAGS, attr.qp_access_flags & !(access | ACCESS_MW_BIND) == 0),
        (QP_PATH_MTU, attr.path_mtu >= 1 && attr.path_mtu <= limits.mtu),
        (QP_DEST_QPN, attr.dest_qp_num <= 0x00ff_ffff),
        (QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic <= limits.rd_atom),
        (QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic <= limits.rd_atom),
        (QP_MIN_RNR_TIMER, attr.min_rnr_timer <= 31),
        (QP_TIMEOUT, attr.timeout <= 31),
        (QP_RETRY_CNT, attr.retry_cnt <= 7),
        (QP_RNR_RETRY, attr.rnr_retry <= 7),
        // The port of the address is not compared with the QP's: NCCL passes the peer's.
        (QP_AV, port_ok(ah.port_num)),
        (QP_AV, ah.is_global != 0 || !limits.ethernet),
        (QP_AV, ah.is_global == 0 || ah.grh.dgid != Gid::default()),
        (QP_AV, limits.ethernet || ah.dlid != 0),
        (QP_AV, ah.sl <= 15),
    ];
    if !checks.iter().all(|(bit, ok)| mask & bit == 0 || *ok) {
        return Err(libc::EINVAL);
    }
    // To the kernel an entry that is empty. Tables of devices are long, so that no index lies beyond them.
    let gid_ok = ah.is_global == 0 || usize::from(ah.grh.sgid_index) < limits.gids;
    if mask & QP_AV == 0 || gid_ok { Ok(()) } else { Err(libc::ENODATA) }
}

/// Copies the given attributes.
pub fn apply(to: &mut QpAttr, from: &QpAttr, mask: u32) {
    macro_rules! copy {
        ($($bit:ident: $($field:ident),+;)+) => { $(if mask & $bit != 0 { $(to.$field = from.$field;)+ })+ };
    }
    copy! {
        QP_ACCESS_FLAGS: qp_access_flags;
        QP_PKEY_INDEX: pkey_index;
        QP_PORT: port_num;
        QP_AV: ah_attr;
        QP_PATH_MTU: path_mtu;
        QP_TIMEOUT: timeout;
        QP_RETRY_CNT: retry_cnt;
        QP_RNR_RETRY: rnr_retry;
        QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        QP_ALT_PATH: alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        QP_MIN_RNR_TIMER: min_rnr_timer;
        QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        QP_PATH_MIG_STATE: path_mig_state;
        QP_DEST_QPN: dest_qp_num;
        QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
    }
    if mask & QP_RQ_PSN != 0 {
        to.rq_psn = from.rq_psn & 0x00ff_ffff;
    }
    if mask & QP_SQ_PSN != 0 {
        to.sq_psn = from.sq_psn & 0x00ff_ffff;
    }
}

/// RNR delay of a `min_rnr_timer` code, in microseconds.
pub fn rnr_delay_us(code: u32) -> u64 {
    const TABLE: [u64; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
        5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122_880, 163_840, 245_760,
        327_680, 491_520,
    ];
    TABLE.get(code as usize).copied().unwrap_or(655_360)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_required_bit_is_needed_and_no_stray_bit_is_allowed() {
        for (from, to) in [(QPS_RESET, QPS_INIT), (QPS_INIT, QPS_RTR), (QPS_RTR, QPS_RTS)] {
            let r = rule(from, to).expect("transition exists");
            assert_eq!(check_mask(from, to, QP_STATE | r.required), Ok(()));
            for bit in (0..26).map(|b| 1_u32 << b).filter(|b| b & QP_STATE == 0) {
                if r.required & bit != 0 {
                    assert_eq!(
                        check_mask(from, to, r.required & !bit),
                        Err(libc::EINVAL),
                        "{from}->{to} without {bit:#x}"
                    );
                } else {
                    let allowed = r.optional & bit != 0;
                    assert_eq!(
                        check_mask(from, to, r.required | bit).is_ok(),
                        allowed,
                        "{from}->{to} with {bit:#x}"
                    );
                }
            }
        }
    }

    #[test]
    fn illegal_transitions_are_refused() {
        let pairs = [
            (QPS_RESET, QPS_RTR),
            (QPS_RESET, QPS_RTS),
            (QPS_INIT, QPS_RTS),
            (QPS_RTS, QPS_RTR),
            (QPS_RTS, QPS_INIT),
            (QPS_ERR, QPS_INIT),
            (QPS_ERR, QPS_RTS),
            (QPS_SQE, QPS_RTS),
            (QPS_RTR, QPS_SQD),
            (7, QPS_RESET),
            (QPS_INIT, 99),
        ];
        for (from, to) in pairs {
            assert_eq!(rule(from, to), None, "{from}->{to}");
        }
    }
}
