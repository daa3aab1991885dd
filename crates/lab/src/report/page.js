"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");

  // Light, dark, or as the system is; kept for the next report where the browser allows it.
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const kept = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("pvswitch-lab-theme", value);
      return localStorage.getItem("pvswitch-lab-theme");
    } catch {
      return null;
    }
  };
  let theme = Math.max(0, themes.indexOf(kept()));
  const show = () => {
    const name = themes[theme];
    if (name === "system") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", name);
    button.textContent = "Theme: " + name;
  };
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    kept(themes[theme]);
    show();
  });
  show();

  // Tables: up, down, and as they were. Cells without a value stay last either way.
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.classList.contains("missing")) return null;
    const value = cell.dataset.v;
    if (value === undefined) return cell.textContent.trim();
    return value === "" ? null : Number(value);
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, "en", { numeric: true });
  };
  const sort = (table, rows, column, order) => {
    const sorted = rows.map((row) => [key(row, column), row]);
    if (order !== "none") {
      const sign = order === "ascending" ? 1 : -1;
      sorted.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * compare(a, b);
      });
    }
    table.tBodies[0].append(...sorted.map(([, row]) => row));
  };
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  for (const table of document.querySelectorAll("table.sorts")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const order = next[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        sort(table, rows, column, order);
      });
    });
  }

  // Commands: a file's page may not be let near the clipboard the new way.
  const copyByHand = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of document.querySelectorAll("button.copy")) {
    const said = (done) => {
      button.textContent = done ? "Copied" : "Press Ctrl-C";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        said(true);
      } catch {
        const done = copyByHand(code.textContent);
        if (!done) getSelection().selectAllChildren(code);
        button.focus();
        said(done);
      }
    });
  }

  // What is folded away is printed too.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const it of folded) it.open = true;
  });
  addEventListener("afterprint", () => {
    for (const it of folded) it.open = false;
  });
})();
