//! The keys of a front end's handshake: what is offered, checked; and what we write.

use switch::vnet::Offloads;

use crate::back::{CtrlKeys, Failure, QueueKeys, Tree, decimal};

/// What we would have, if it is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Queues.
    pub queues: u16,
    /// Fewest queues that are any use.
    pub fewest: u16,
    /// One event channel for each ring.
    pub split: bool,
    /// A control ring.
    pub ctrl: bool,
    /// `feature-smart-poll`.
    pub smart_poll: bool,
    /// What we receive spread over the queues by a hash, which takes a control ring.
    pub hash: bool,
    /// Of multicast only what we list ([`change`](super::TxQueue::change)).
    pub multicast: bool,
}

/// What both sides can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Queues, 1 at least.
    pub queues: u16,
    /// One event channel for each ring.
    pub split: bool,
    /// There is a control ring.
    pub ctrl: bool,
    /// The smart poll flag is kept by both sides.
    pub smart_poll: bool,
    /// Of multicast only what we list comes.
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

/// A number; missing or garbled, `default`: a back end is no reason to fail.
pub fn number<T: Tree>(store: &mut T, path: &str, default: u32) -> Result<u32, Failure> {
    let value = store.read(path)?;
    Ok(value.and_then(|value| decimal(&value)).unwrap_or(default))
}

impl Agreed {
    /// Reads what the back end in `back` offers to us in `front`. `None`: it would flip pages,
    /// which nobody can any more.
    pub fn read<T: Tree>(
        store: &mut T,
        front: &str,
        back: &str,
        wishes: &Wishes,
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
            split: offers("split-event-channels")? && wishes.split,
            ctrl: offers("ctrl-ring")? && (wishes.ctrl || wishes.hash),
            smart_poll: offers("smart-poll")? && wishes.smart_poll,
            multicast: offers("multicast-control")? && wishes.multicast,
            sg,
            gso_tcpv4: sg && offers("gso-tcpv4")?,
            gso_tcpv6: sg && offers("gso-tcpv6")?,
            csum4: !offers("no-csum-offload")?,
            csum6: offers("ipv6-csum-offload")?,
            trusted: true,
        };
        let most = number(store, &format!("{back}/multi-queue-max-queues"), 1)?;
        let queues = u32::from(wishes.queues).min(most).max(1);
        let trusted = number(store, &format!("{front}/trusted"), 1)? != 0;
        Ok(Some(Self { queues: u16::try_from(queues).unwrap_or(1), trusted, ..agreed }))
    }

    /// What frames to the back end may leave undone. Whether a blank checksum is of IPv6 no header
    /// tells: it takes both.
    pub fn takes(&self) -> Offloads {
        let csum = self.csum4 && self.csum6;
        let (tso4, tso6) = (csum && self.gso_tcpv4, csum && self.gso_tcpv6);
        // No extra info says that CWR is for the first segment alone.
        Offloads { csum, tso4, tso6, ..Offloads::default() }
    }

    /// Names of what was agreed on, for people.
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

/// Asks the back end to pass of multicast only what is on its list.
pub const FILTER: &str = "request-multicast-control";

/// Keys that an earlier front end may have left and that would say something else now.
pub const STALE: [&str; 7] = [
    "tx-ring-ref",
    "rx-ring-ref",
    "event-channel",
    "event-channel-tx",
    "event-channel-rx",
    "ctrl-ring-ref",
    "event-channel-ctrl",
];

/// What goes before Connected, in one transaction.
pub fn written(
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
    // Also as 0: an earlier front end may have left a 1, and its list went with it.
    put(FILTER.into(), u32::from(agreed.multicast));
    keys
}
