//! The unit of the original study's time-outs, which it does not define: fitted to its figures.

use super::original::{Row, TABLE};
use super::setting::TIMEOUTS;

/// Packets to the guest while it sends 1 GB: an acknowledgement for every second one of 1448 bytes.
const ACKS: f64 = 1e9 / 1448.0 / 2.0;

/// A published figure, as an equation for the unit: `units` of them are `us`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Equation {
    /// The time-out of the row.
    pub timeout: &'static str,
    /// Units that the first packet of an interrupt waits for it.
    pub units: f64,
    /// Microseconds that it waits, by the figure.
    pub us: f64,
}

/// The unit that fits equations best.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The unit in microseconds.
    pub us: f64,
    /// Root of the mean square of the residuals, in microseconds.
    pub residual_us: f64,
    /// The equations that it is fitted to.
    pub equations: Vec<Equation>,
}

/// Fits the unit by least squares. `None`: no equation has any of it, so every unit fits alike.
pub fn fit(equations: Vec<Equation>) -> Option<Fit> {
    let sum = |of: &dyn Fn(&Equation) -> f64| equations.iter().map(of).sum::<f64>();
    let squares = sum(&|row| row.units * row.units);
    if squares <= 0.0 {
        return None;
    }
    let us = sum(&|row| row.units * row.us) / squares;
    let off = sum(&|row| (row.us - us * row.units).powi(2)) / equations.len() as f64;
    Some(Fit { us, residual_us: off.sqrt(), equations })
}

/// The equations of the pings, which are alone on the ring: what one takes longer than in the first
/// row is its time-out, and the search for further packets, from the row `0` on.
pub fn of_pings(table: &[Row]) -> Vec<Equation> {
    let before = table.first().and_then(|row| row.pings).unwrap_or_default();
    let of = |row: &Row| Some(equation(row, 1.0, row.pings? - before));
    table.iter().filter_map(of).collect()
}

/// The equations of packets for each interrupt while the guest sends. Packets arrive at a steady
/// mean rate, and one interrupt is for the first and all that arrive within its time-out. Only rows
/// with a time-out: the others have 1.0 packets, so nothing waits.
pub fn of_packets(table: &[Row]) -> Vec<Equation> {
    let of = |row: &Row| {
        let [seconds, packets] = row.from_guest;
        equation(row, packets, 1e6 * seconds / ACKS * (packets - 1.0))
    };
    table.iter().map(of).filter(|row| row.units > 0.0).collect()
}

fn equation(row: &Row, pending: f64, us: f64) -> Equation {
    let timeout = TIMEOUTS.iter().find(|timeout| timeout.name == row.timeout);
    let units = timeout.map_or(0.0, |timeout| timeout.wait.units(pending));
    Equation { timeout: row.timeout, units, us }
}

/// The fit that plans use: to pings if they determine it, else to packets for each interrupt.
pub fn fitted() -> Fit {
    let fit = fit(of_pings(&TABLE)).or_else(|| fit(of_packets(&TABLE)));
    fit.expect("the original's table has time-outs")
}

/// The unit in whole microseconds.
pub fn us() -> u32 {
    fitted().us.round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pings(seconds: [Option<f64>; 6]) -> Vec<Row> {
        let rows = TABLE.iter().zip(seconds);
        rows.map(|(row, pings)| Row { pings, ..*row }).collect()
    }

    #[test]
    fn pings_of_rows_without_a_time_out_do_not_determine_the_unit() {
        let equations = of_pings(&TABLE);
        let published: Vec<_> = equations.iter().map(|row| (row.timeout, row.units)).collect();
        assert_eq!(published, [("before", 0.0), ("0", 0.0)]);
        assert_eq!(fit(equations), None);
    }

    #[test]
    fn pings_of_rows_with_one_would_determine_it_exactly() {
        let table = pings([Some(98.0), None, Some(298.0), None, Some(498.0), None]);
        let fit = fit(of_pings(&table)).unwrap();
        assert!((fit.us - 200.0).abs() < 1e-9 && fit.residual_us < 1e-9, "{fit:?}");
    }

    #[test]
    fn the_unit_is_that_of_packets_for_each_interrupt_with_its_residual() {
        let fit = fitted();
        assert_eq!(fit.equations.len(), 4);
        assert_eq!(us(), 222);
        assert!((fit.residual_us - 106.0).abs() < 1.0, "{fit:?}");
        // No other unit is closer.
        for other in [fit.us - 1.0, fit.us + 1.0] {
            let off = |us: f64| {
                fit.equations.iter().map(|row| (row.us - us * row.units).powi(2)).sum::<f64>()
            };
            assert!(off(other) > off(fit.us));
        }
    }
}
