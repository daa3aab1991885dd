//! The keys of a front end's handshake: the back end's offer, validated, and the keys we write.

use switch::vnet::Offloads;

use crate::back::{CtrlKeys, Failure, QueueKeys, Tree, decimal};

/// Options of a front end, used if the back end offers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontOptions {
    /// Number of queues.
    pub queues: u16,
    /// Minimum number of queues.
    pub fewest: u16,
    /// Separate event channels for both rings.
    pub split: bool,
    /// A control ring.
    pub ctrl: bool,
    /// `feature-smart-poll`.
    pub smart_poll: bool,
    /// Whether received frames are spread over the queues by a hash, which needs a control ring.
    pub hash: bool,
    /// Whether only listed multicast is received ([`change`](super::TxQueue::change)).
    pub multicast: bool,
}

/// Features of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Number of queues, at least 1.
    pub queues: u16,
    /// Separate event channels for both rings.
    pub split: bool,
    /// Whether there is a control ring.
    pub ctrl: bool,
    /// Whether both ends use the smart poll flag.
    pub smart_poll: bool,
    /// Whether only listed multicast is received.
    pub multicast: bool,
    /// Packets of several slots may be sent.
    pub sg: bool,
    /// GSO TCPv4 may be sent.
    pub gso_tcpv4: bool,
    /// GSO TCPv6 may be sent.
    pub gso_tcpv6: bool,
    /// IPv4 checksums may be left blank.
    pub csum4: bool,
    /// IPv6 checksums may be left blank.
    pub csum6: bool,
    /// Whether the toolstack trusts the back end.
    pub trusted: bool,
}

/// Reads a number; `default` if it is missing or invalid: an invalid key is not an error here.
pub fn number<T: Tree>(store: &mut T, path: &str, default: u32) -> Result<u32, Failure> {
    let value = store.read(path)?;
    Ok(value.and_then(|value| decimal(&value)).unwrap_or(default))
}

impl Agreed {
    /// Reads the offer of the back end in `back` to the front end in `front`. `None`: it flips
    /// pages, which is not supported.
    pub fn read<T: Tree>(
        store: &mut T,
        front: &str,
        back: &str,
        options: &FrontOptions,
    ) -> Result<Option<Self>, Failure> {
        let mut offers = |name: &str| -> Result<bool, Failure> {
            Ok(number(store, &format!("{back}/feature-{name}"), 0)? != 0)
        };
        if !offers("rx-copy")? {
            return Ok(None);
        }
        let sg = offers("sg")?;
        let agreed = Self {
            queues: 1,
            split: offers("split-event-channels")? && options.split,
            ctrl: offers("ctrl-ring")? && (options.ctrl || options.hash),
            smart_poll: offers("smart-poll")? && options.smart_poll,
            multicast: offers("multicast-control")? && options.multicast,
            sg,
            gso_tcpv4: sg && offers("gso-tcpv4")?,
            gso_tcpv6: sg && offers("gso-tcpv6")?,
            csum4: !offers("no-csum-offload")?,
            csum6: offers("ipv6-csum-offload")?,
            trusted: true,
        };
        let most = number(store, &format!("{back}/multi-queue-max-queues"), 1)?;
        let queues = u32::from(options.queues).min(most).max(1);
        let trusted = number(store, &format!("{front}/trusted"), 1)? != 0;
        Ok(Some(Self { queues: u16::try_from(queues).unwrap_or(1), trusted, ..agreed }))
    }

    /// Offloads of frames to the back end. The vnet header does not show whether a blank checksum
    /// is of IPv6, so both protocols are needed.
    pub fn offloads(&self) -> Offloads {
        let csum = self.csum4 && self.csum6;
        let (tso4, tso6) = (csum && self.gso_tcpv4, csum && self.gso_tcpv6);
        // No extra info says that CWR is only for the first segment.
        Offloads { csum, tso4, tso6, ..Offloads::default() }
    }

    /// Names of the features.
    pub fn names(&self) -> Vec<&'static str> {
        let all = [
            (self.sg, "sg"),
            (self.gso_tcpv4, "gso-tcpv4"),
            (self.gso_tcpv6, "gso-tcpv6"),
            (self.csum4, "csum"),
            (self.csum6, "ipv6-csum"),
            (self.split, "split-event-channels"),
            (self.ctrl, "ctrl-ring"),
            (self.smart_poll, "smart-poll"),
            (self.multicast, "multicast"),
            (!self.trusted, "untrusted"),
        ];
        all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
    }
}

/// Requests only multicast on our list.
pub const FILTER: &str = "request-multicast-control";

/// Keys that an earlier front end may have left, and that would be wrong now.
pub const STALE: [&str; 7] = [
    "tx-ring-ref",
    "rx-ring-ref",
    "event-channel",
    "event-channel-tx",
    "event-channel-rx",
    "ctrl-ring-ref",
    "event-channel-ctrl",
];

/// The keys written before Connected, in one transaction.
pub fn connected_keys(
    agreed: &Agreed,
    queues: &[QueueKeys],
    ctrl: Option<&CtrlKeys>,
) -> Vec<(String, String)> {
    let mut keys = Vec::new();
    let mut put = |key: String, value: u32| keys.push((key, value.to_string()));
    if queues.len() > 1 {
        put("multi-queue-num-queues".into(), u32::from(agreed.queues));
    }
    for (n, queue) in queues.iter().enumerate() {
        //= netif.h: with one queue the keys are flat; with more, only below queue-N.
        let dir = if queues.len() > 1 { format!("queue-{n}/") } else { String::new() };
        put(format!("{dir}tx-ring-ref"), queue.tx_ref);
        put(format!("{dir}rx-ring-ref"), queue.rx_ref);
        match queue.rx_port {
            None => put(format!("{dir}event-channel"), queue.tx_port),
            Some(rx_port) => {
                put(format!("{dir}event-channel-tx"), queue.tx_port);
                put(format!("{dir}event-channel-rx"), rx_port);
            }
        }
    }
    if let Some(ctrl) = ctrl {
        put("ctrl-ring-ref".into(), ctrl.ring_ref);
        put("event-channel-ctrl".into(), ctrl.port);
    }
    put("request-rx-copy".into(), 1);
    for name in ["rx-notify", "sg", "gso-tcpv4", "gso-tcpv6", "ipv6-csum-offload"] {
        put(format!("feature-{name}"), 1);
    }
    put("feature-smart-poll".into(), u32::from(agreed.smart_poll));
    // Also written as 0: an earlier front end may have left a 1, and its list is lost.
    put(FILTER.into(), u32::from(agreed.multicast));
    keys
}
