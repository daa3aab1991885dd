//! Tools that generate traffic by a kernel's network stack: iperf3 and ping.

use serde_json::Value;

use super::{Namespace, Place, Process, START_MAX_S, Stage, wait_for};
use crate::error::Fail;

/// A flow of iperf3 from its client to its server.
#[derive(Clone, Debug)]
pub struct Iperf {
    /// Address of the server.
    pub to: String,
    /// Port of the server; one for each flow, because a server serves one client at a time.
    pub port: u16,
    /// Duration, in seconds.
    pub seconds: f64,
    /// UDP instead of TCP.
    pub udp: bool,
    /// Bytes of a write, or of a datagram's payload; 0: iperf3's default.
    pub len: u32,
    /// From server to client.
    pub reverse: bool,
    /// Number of parallel streams.
    pub streams: u32,
    /// Payload bit rate of each stream, in bit/s; 0: unlimited.
    pub rate: f64,
    /// Further options of the client, passed unchanged.
    pub more: Vec<String>,
}

impl Iperf {
    /// Returns a flow of one TCP stream.
    pub fn tcp(to: &str, port: u16, seconds: f64) -> Self {
        Self {
            to: to.into(),
            port,
            seconds,
            udp: false,
            len: 0,
            reverse: false,
            streams: 1,
            rate: 0.0,
            more: Vec::new(),
        }
    }

    /// Returns a flow of UDP datagrams with `len` bytes of payload.
    pub fn udp(to: &str, port: u16, seconds: f64, len: u32) -> Self {
        Self { udp: true, len, ..Self::tcp(to, port, seconds) }
    }

    /// Starts a server and waits until it listens. It serves any number of clients, one at a time.
    pub fn server(
        stage: &Stage,
        netns: &Namespace,
        cpus: &[usize],
        port: u16,
    ) -> Result<Process, Fail> {
        let args = ["-s", "-p", &port.to_string()].map(String::from);
        let mut server =
            stage.start(&format!("iperf3-s{port}"), "iperf3", &args, &netns.on(cpus))?;
        wait_for(&format!("iperf3 to listen at port {port}"), START_MAX_S, || {
            server.check()?;
            Ok(has_listener(&format!("{}{}", netns.read("tcp"), netns.read("tcp6")), port))
        })?;
        Ok(server)
    }

    /// Starts the client.
    pub fn start(&self, stage: &Stage, place: &Place) -> Result<Flow, Fail> {
        let name = format!("iperf3-c{}", self.port);
        let process = stage.start(&name, "iperf3", &self.args(), place)?;
        Ok(Flow { process, seconds: self.seconds })
    }

    fn args(&self) -> Vec<String> {
        let mut args: Vec<String> = ["-J", "-c", &self.to, "-p"].map(String::from).into();
        args.push(self.port.to_string());
        args.extend(["-t".into(), format!("{:.0}", self.seconds.ceil())]);
        args.extend(["-P".into(), self.streams.to_string()]);
        if self.udp {
            args.extend(["-u", "-b"].map(String::from));
            args.push(format!("{:.0}", self.rate));
        } else if self.rate > 0.0 {
            args.extend(["-b".into(), format!("{:.0}", self.rate)]);
        }
        if self.len > 0 {
            args.extend(["-l".into(), self.len.to_string()]);
        }
        if self.reverse {
            args.push("-R".into());
        }
        args.extend(self.more.iter().cloned());
        args
    }
}

/// Whether a table of sockets (`/proc/net/tcp`) has a listener at a port.
fn has_listener(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let end = format!(":{port:04X}");
    table.lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.get(1).is_some_and(|local| local.ends_with(&end)) && words.get(3) == Some(&LISTEN)
    })
}

/// A running iperf3 client.
#[derive(Debug)]
pub struct Flow {
    /// Its process; the flow ends with it.
    pub process: Process,
    seconds: f64,
}

impl Flow {
    /// Waits for it to end; returns its results.
    pub fn report(mut self) -> Result<Traffic, Fail> {
        let ended = self.process.finish(self.seconds + 20.0);
        // Some errors are in its report only, not in its log.
        let text = self.process.printed();
        let report: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        if let Some(error) = report["error"].as_str() {
            return Err(Fail::Cell(format!("process '{}': {error}", self.process.name)));
        }
        ended?;
        Traffic::read(&report).ok_or_else(|| self.process.fail("printed no report"))
    }
}

/// Results of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// Received payload, in bit/s, averaged over the whole flow.
    pub bits_per_s: f64,
    /// Sent payload, in bit/s.
    pub sent_bits_per_s: f64,
    /// Retransmitted TCP segments.
    pub retransmits: f64,
    /// Datagrams sent.
    pub packets: f64,
    /// Datagrams sent and not received.
    pub lost: f64,
}

impl Traffic {
    fn read(report: &Value) -> Option<Self> {
        let end = &report["end"];
        let number = |sum: &str, key: &str| end[sum][key].as_f64().unwrap_or(0.0);
        let sent_bits_per_s = end["sum_sent"]["bits_per_second"].as_f64()?;
        let (packets, lost) = (number("sum", "packets"), number("sum", "lost_packets"));
        let mut bits_per_s = number("sum_received", "bits_per_second");
        if packets > 0.0 {
            // Some versions count sent datagrams as received.
            bits_per_s = bits_per_s.min(number("sum", "bits_per_second") * (1.0 - lost / packets));
        }
        let retransmits = number("sum_sent", "retransmits");
        Some(Self { bits_per_s, sent_bits_per_s, retransmits, packets, lost })
    }
}

/// Plan of pings to an address.
#[derive(Clone, Copy, Debug)]
pub struct PingPlan {
    /// Time from one request to the next.
    pub interval_ms: f64,
    /// Number of requests.
    pub count: u32,
    /// Bytes after the header.
    pub size: u32,
}

/// A running ping.
#[derive(Debug)]
pub struct Ping {
    process: Process,
    seconds: f64,
}

impl Ping {
    /// Pings an address. `ping` busy-waits for the last 10 ms of an interval.
    pub fn start(stage: &Stage, place: &Place, to: &str, pings: PingPlan) -> Result<Self, Fail> {
        let PingPlan { interval_ms, count, size } = pings;
        let interval = format!("{:.4}", interval_ms / 1e3);
        let (count_word, size) = (count.to_string(), size.to_string());
        let args = ["-n", "-W", "1", "-i", &interval, "-c", &count_word, "-s", &size, to];
        let process = stage.start("ping", "ping", &args.map(String::from), place)?;
        Ok(Self { process, seconds: f64::from(count) * interval_ms / 1e3 })
    }

    /// Pings an address `count` times, each after the reply to the previous one or after 10 ms.
    pub fn flood(stage: &Stage, place: &Place, to: &str, count: u32) -> Result<Self, Fail> {
        let args = ["-n", "-q", "-f", "-W", "1", "-c", &count.to_string(), to].map(String::from);
        let process = stage.start("ping", "ping", &args, place)?;
        Ok(Self { process, seconds: f64::from(count) * 0.01 })
    }

    /// Waits for it to end; returns its results. Lost replies are no error.
    pub fn report(mut self) -> Result<Pings, Fail> {
        let what = format!("process '{}' to end", self.process.name);
        let by = self.seconds + 15.0;
        wait_for(&what, by, || Ok(self.process.check().is_err()))?;
        let text = self.process.printed();
        Pings::read(&text).ok_or_else(|| self.process.fail("printed no summary"))
    }

    /// Pings until a reply arrives, so that addresses are resolved and learned.
    pub fn until_answered(netns: &Namespace, to: &str) -> Result<(), Fail> {
        wait_for(&format!("{to} to answer a ping"), START_MAX_S, || {
            match netns.run("ping", &format!("-n -q -c 1 -W 1 {to}")) {
                Err(missing @ Fail::Missing(_)) => Err(missing),
                answered => Ok(answered.is_ok()),
            }
        })
    }
}

/// Results of pings.
#[derive(Clone, Debug, PartialEq)]
pub struct Pings {
    /// Requests sent.
    pub sent: u64,
    /// Replies received.
    pub received: u64,
    /// Time since the first request, in seconds.
    pub seconds: f64,
    /// Mean round-trip time, in us.
    pub mean_us: f64,
    /// Round-trip times in us, sorted; empty for a flood.
    times_us: Vec<f64>,
}

impl Pings {
    fn read(text: &str) -> Option<Self> {
        let summary = text.lines().find(|line| line.contains(" packets transmitted, "))?;
        let number = |word: &str| word.split_whitespace().next().and_then(|n| n.parse().ok());
        let mut parts = summary.split(", ");
        let (sent, received) = (number(parts.next()?)?, number(parts.next()?)?);
        let ms = summary.rsplit("time ").next().and_then(|word| word.strip_suffix("ms"));
        let seconds = ms.and_then(|ms| ms.parse::<f64>().ok()).unwrap_or(0.0) / 1e3;
        let rtt = text.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "));
        let mean = rtt.and_then(|rtt| rtt.split('/').nth(1)).and_then(|n| n.parse::<f64>().ok());
        let time = |line: &str| {
            let word = line.rsplit_once(" time=")?.1.split_whitespace().next()?;
            word.parse::<f64>().ok().map(|ms| ms * 1e3)
        };
        let mut times_us: Vec<f64> = text.lines().filter_map(time).collect();
        times_us.sort_by(f64::total_cmp);
        Some(Self { sent, received, seconds, mean_us: mean.unwrap_or(0.0) * 1e3, times_us })
    }

    /// Returns a quantile (`p`: 0.5, 0.99) of the round-trip times, in us; `None` for a flood.
    pub fn quantile_us(&self, p: f64) -> Option<f64> {
        let last = self.times_us.len().checked_sub(1)?;
        let i = (p * self.times_us.len() as f64).ceil() as usize;
        Some(self.times_us[i.saturating_sub(1).min(last)])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pings_are_read_with_their_times() {
        let text = "PING 10.9.0.10 (10.9.0.10) 56(84) bytes of data.\n\
            64 bytes from 10.9.0.10: icmp_seq=1 ttl=64 time=0.200 ms\n\
            64 bytes from 10.9.0.10: icmp_seq=2 ttl=64 time=1.50 ms\n\
            64 bytes from 10.9.0.10: icmp_seq=4 ttl=64 time=0.100 ms\n\n\
            --- 10.9.0.10 ping statistics ---\n\
            4 packets transmitted, 3 received, 25% packet loss, time 2999ms\n\
            rtt min/avg/max/mdev = 0.100/0.600/1.500/0.012 ms\n";
        let pings = Pings::read(text).unwrap();
        assert_eq!((pings.sent, pings.received), (4, 3));
        assert_eq!((pings.seconds, pings.mean_us), (2.999, 600.0));
        assert_eq!(pings.quantile_us(0.5), Some(200.0));
        assert_eq!(pings.quantile_us(0.99), Some(1500.0));
        assert_eq!(Pings::read("ping: connect: Network is unreachable"), None);
    }

    #[test]
    fn a_flood_has_only_a_summary() {
        let text = "\n--- 127.0.0.1 ping statistics ---\n\
            500 packets transmitted, 500 received, 0% packet loss, time 25ms\n\
            rtt min/avg/max/mdev = 0.012/0.034/0.150/0.012 ms, ipg/ewma 0.050/0.034 ms\n";
        let pings = Pings::read(text).unwrap();
        assert_eq!((pings.received, pings.seconds, pings.mean_us), (500, 0.025, 34.0));
        assert_eq!(pings.quantile_us(0.99), None);
    }

    #[test]
    fn reports_of_both_protocols_are_read() {
        let tcp = json!({"end": {
            "sum_sent": {"bits_per_second": 2e9, "retransmits": 3},
            "sum_received": {"bits_per_second": 1.9e9},
        }});
        let read = Traffic::read(&tcp).unwrap();
        assert_eq!((read.bits_per_s, read.retransmits, read.packets), (1.9e9, 3.0, 0.0));
        let udp = json!({"end": {
            "sum": {"bits_per_second": 1e8, "packets": 1000, "lost_packets": 250},
            "sum_sent": {"bits_per_second": 1e8}, "sum_received": {"bits_per_second": 1e8},
        }});
        let read = Traffic::read(&udp).unwrap();
        assert_eq!((read.bits_per_s, read.lost), (0.75e8, 250.0));
        assert_eq!(Traffic::read(&json!({"error": "unable to connect"})), None);
    }

    #[test]
    fn listeners_are_distinguished_from_connections() {
        let table = "sl local_address rem_address st\n\
            0: 00000000:1451 00000000:0000 0A 00000000:00000000\n\
            1: 0100007F:1452 0100007F:9999 01 00000000:00000000\n";
        assert!(has_listener(table, 0x1451));
        assert!(!has_listener(table, 0x1452));
    }
}
