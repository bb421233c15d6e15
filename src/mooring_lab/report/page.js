// Sort a table by the column whose header is pressed: ascending, then descending; cells without a value stay last.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      const numeric = head.hasAttribute("data-numeric");
      const value = (row) => row.cells[column].dataset.sort;
      const number = (text) => (text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text));
      const order = (a, b) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const ascending = numeric ? Math.sign(number(a) - number(b)) || 0 : a.localeCompare(b, "en", { numeric: true });
        return descending ? -ascending : ascending;
      };
      const rows = Array.from(table.tBodies[0].rows);
      rows.sort((a, b) => order(value(a), value(b)));
      table.tBodies[0].append(...rows);
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    });
  });
}
