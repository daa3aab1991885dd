//! Frame rates of the last samples, as a line of bars.

use std::collections::{HashMap, VecDeque};

use super::sample::Picture;

/// Most samples of a port.
const SAMPLES_MAX: usize = 60;
/// Bars from the least to the highest.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Frames per second of each port, in both directions together.
#[derive(Default)]
pub struct Trends(HashMap<String, VecDeque<f64>>);

impl Trends {
    /// Adds a sample. Ports that are gone are forgotten.
    pub fn add(&mut self, picture: &Picture) {
        let mut old = std::mem::take(&mut self.0);
        for port in &picture.ports {
            let mut rates = old.remove(&port.name).unwrap_or_default();
            if let (Some(from), Some(to)) = (port.in_frames, port.out_frames) {
                if rates.len() == SAMPLES_MAX {
                    rates.pop_front();
                }
                rates.push_back(from + to);
            }
            self.0.insert(port.name.clone(), rates);
        }
    }

    /// The last `width` samples of a port, the newest last; the highest bar is the highest of
    /// them.
    pub fn line(&self, port: &str, width: usize) -> String {
        let rates = self.0.get(port).into_iter().flatten();
        let rates: Vec<_> = rates.copied().collect();
        let rates = &rates[rates.len().saturating_sub(width)..];
        let most = rates.iter().copied().fold(1.0, f64::max);
        let bar = |rate: &f64| match rate {
            rate if *rate <= 0.0 => ' ',
            rate => BARS[((rate / most * 8.0).ceil() as usize).clamp(1, 8) - 1],
        };
        rates.iter().map(bar).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::Port;
    use super::*;

    fn picture(ports: &[(&str, Option<f64>)]) -> Picture {
        let port = |(name, rate): &(&str, Option<f64>)| Port {
            name: (*name).into(),
            in_frames: *rate,
            out_frames: rate.map(|_| 0.0),
            ..Port::default()
        };
        Picture { ports: ports.iter().map(port).collect(), ..Picture::default() }
    }

    #[test]
    fn bars_show_the_last_samples_in_proportion() {
        let mut trends = Trends::default();
        for rate in [None, Some(0.0), Some(100.0), Some(800.0), Some(401.0)] {
            trends.add(&picture(&[("a", rate)]));
        }
        assert_eq!(trends.line("a", 10), " ▁█▅", "the first has no rate");
        assert_eq!(trends.line("a", 2), "█▅");
        assert_eq!(trends.line("b", 2), "");
        trends.add(&picture(&[("b", Some(1.0))]));
        assert_eq!((trends.line("a", 9), trends.line("b", 9)), (String::new(), "█".into()));
        (0..100).for_each(|_| trends.add(&picture(&[("b", Some(1.0))])));
        assert_eq!(trends.line("b", 999).chars().count(), SAMPLES_MAX);
    }
}
