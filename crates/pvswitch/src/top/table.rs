//! Tables of text: columns stay in place while numbers change, and are narrowed or hidden on a
//! narrow terminal.

use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// One column.
#[derive(Clone, Copy)]
pub struct Column {
    pub head: &'static str,
    /// Minimum and maximum width.
    pub width: (usize, usize),
    /// Numbers are aligned to the right.
    pub right: bool,
    /// Rank of the column: without room, those of the highest are hidden first; 0 never.
    pub rank: u8,
}

/// A column of numbers.
pub const fn number(head: &'static str, width: usize, rank: u8) -> Column {
    Column { head, width: (width, width), right: true, rank }
}

/// A column of words.
pub const fn word(head: &'static str, least: usize, most: usize, rank: u8) -> Column {
    Column { head, width: (least, most), right: false, rank }
}

/// Contents of a cell.
pub type Cell = (String, Style);

/// Terminal columns of a text.
fn columns_of(text: &str) -> usize {
    text.chars().count()
}

/// Cuts `text` to `width` columns; `~` marks a cut.
pub fn cut(text: &str, width: usize) -> String {
    if columns_of(text) <= width {
        return text.into();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}{}", if width > 0 { "~" } else { "" })
}

/// The lines of a table: its head and one for each row. At most `width` columns, the first `indent`
/// of them empty.
pub fn lines(
    columns: &[Column],
    rows: &[Vec<Cell>],
    width: usize,
    indent: usize,
    head: Style,
) -> Vec<Line<'static>> {
    let widths = widths(columns, rows, width.saturating_sub(indent));
    let heads = columns.iter().map(|column| (column.head.to_string(), head)).collect();
    let line = |cells: &Vec<Cell>| {
        let mut spans = vec![Span::raw(" ".repeat(indent))];
        let shown = columns.iter().zip(&widths).zip(cells);
        for ((column, width), (text, style)) in shown.filter(|((_, width), _)| **width > 0) {
            if spans.len() > 1 {
                spans.push(Span::raw(" "));
            }
            let text = cut(text, *width);
            let text =
                if column.right { format!("{text:>width$}") } else { format!("{text:width$}") };
            spans.push(Span::styled(text, *style));
        }
        Line::from(spans)
    };
    std::iter::once(&heads).chain(rows).map(line).collect()
}

/// Width of each column; 0: hidden.
fn widths(columns: &[Column], rows: &[Vec<Cell>], width: usize) -> Vec<usize> {
    let widest = |(i, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(i)).map(|cell| columns_of(&cell.0));
        let most = cells.chain([columns_of(column.head)]).max().unwrap_or(0);
        most.clamp(column.width.0, column.width.1)
    };
    let mut widths: Vec<usize> = columns.iter().enumerate().map(widest).collect();
    loop {
        let shown = widths.iter().filter(|width| **width > 0);
        let total = shown.clone().sum::<usize>() + shown.count().saturating_sub(1);
        let Some(excess) = total.checked_sub(width).filter(|excess| *excess > 0) else {
            return widths;
        };
        let hideable = (0..columns.len()).filter(|i| widths[*i] > 0 && columns[*i].rank > 0);
        let Some(last) = hideable.max_by_key(|i| columns[*i].rank) else { return widths };
        // A column is narrowed before it is hidden.
        let least = columns[last].width.0;
        let narrower = widths[last].saturating_sub(excess);
        widths[last] = if narrower >= least && least > 0 { narrower } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(columns: &[Column], rows: &[Vec<Cell>], width: usize) -> Vec<String> {
        let lines = lines(columns, rows, width, 0, Style::new());
        lines.iter().map(|line| line.to_string().trim_end().to_string()).collect()
    }

    #[test]
    fn columns_are_narrowed_and_then_hidden_by_rank() {
        let columns = [word("NAME", 4, 8, 0), number("RATE/s", 6, 1), word("KIND", 4, 99, 2)];
        let cell = |text: &str| (text.to_string(), Style::new());
        let rows = [vec![cell("longer-than-8"), cell("12.3k"), cell("vhost-user:/tmp/a")]];
        assert_eq!(text(&columns, &rows, 80)[0], "NAME     RATE/s KIND");
        assert_eq!(text(&columns, &rows, 80)[1], "longer-~  12.3k vhost-user:/tmp/a");
        assert_eq!(text(&columns, &rows, 24)[1], "longer-~  12.3k vhost-u~");
        assert_eq!(text(&columns, &rows, 19)[1], "longer-~  12.3k");
        assert_eq!(text(&columns, &rows, 8)[1], "longer-~");
    }
}
