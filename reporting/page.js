// A page that reloads itself keeps its position, the switch and what is unfolded, in the name of its window: browsers
// may forget the session storage of files, and share their local storage between tabs.
(() => {
  const folded = [...document.querySelectorAll("details")], title = one => one.querySelector("summary").textContent;
  let seen = null;
  try {
    seen = JSON.parse(window.name);
  } catch { /* another page has named the window, or none */ }
  if (seen?.page === location.pathname) {
    for (const one of folded) one.open = seen.open.includes(title(one));
    (document.getElementById(seen.axis) || {}).checked = true;
    history.scrollRestoration = "manual";  // the browser's own would come later
    scrollTo(0, seen.top);
  }
  if (!document.querySelector("meta[http-equiv]")) return;
  const keep = () => {  // at once, because a name that is set when the page is left comes too late
    window.name = JSON.stringify({page: location.pathname, open: folded.filter(one => one.open).map(title),
      axis: document.querySelector(".axes input:checked")?.id, top: scrollY});
  };
  for (const kind of ["toggle", "change", "scroll"]) document.addEventListener(kind, keep, true);
})();
// Sorts a table by the column whose head is clicked, or gets Enter, and by a second click the other way around.
(() => {
  const seconds = {h: 3600, min: 60, s: 1};
  const value = text => {
    const times = [...text.matchAll(/([\d.]+) (h|min|s)\b/g)];
    return times.length ? times.reduce((sum, [, count, unit]) => sum + count * seconds[unit], 0)
      : parseFloat(text.replaceAll(",", ""));
  };
  const order = (one, other) => {  // numbers come first
    const [left, right] = [value(one), value(other)];
    if (isNaN(left) && isNaN(right)) return one.localeCompare(other, "en", {numeric: true});
    return isNaN(left) - isNaN(right) || left - right;
  };
  for (const cell of document.querySelectorAll("td:first-child")) {  // learning_rate=2,seed=0 breaks between its parts
    cell.innerHTML = cell.innerHTML.replace(/(\w[,/])(?=[a-z])/g, "$1<wbr>");
  }
  for (const table of document.querySelectorAll("table")) {
    const [head, ...lines] = table.rows, heads = [...head.cells];
    if (lines.length < 2 || heads.at(-1).tagName !== "TH") continue;
    heads.forEach((cell, column) => {
      cell.tabIndex = 0;
      cell.onclick = () => {
        const turn = cell.ariaSort === "ascending" ? -1 : 1;
        for (const other of heads) other.ariaSort = null;
        cell.ariaSort = turn > 0 ? "ascending" : "descending";
        lines.sort((one, other) => turn * order(...[one, other].map(line => line.cells[column].textContent)));
        head.after(...lines);
      };
      cell.onkeydown = event => { if (event.key === "Enter") cell.click(); };
    });
  }
})();
// Orders the pictures of a page, and shows those with a word in their captions.
for (const one of document.querySelectorAll(".gallery")) {
  const [order, word, count, pictures] = ["select", "input", "output", ".pictures"].map(name => one.querySelector(name));
  const all = [...pictures.children], probability = figure => parseFloat(figure.dataset.probability);
  const show = () => {
    const found = all.filter(figure => figure.textContent.toLowerCase().includes(word.value.toLowerCase()));
    if (order.value) found.sort((left, right) => order.value === "class"
      && left.dataset.class.localeCompare(right.dataset.class, "en", {numeric: true})
      || (parseInt(order.value) || -1) * (probability(left) - probability(right)));
    pictures.replaceChildren(...found);
    count.textContent = `${found.length} of ${all.length}`;
  };
  order.onchange = word.oninput = show;
  show();
}
// Adds a button to each command that copies it, also on pages that are no secure context.
for (const one of document.querySelectorAll(".command")) {
  const button = one.appendChild(document.createElement("button"));
  button.textContent = "copy";
  button.onclick = () => {
    getSelection().selectAllChildren(one.querySelector("code"));
    button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl-C";
  };
}
// Shows the values under the pointer or the finger. Without it, browsers show the titles of the points on hover.
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;
  const text = element => {
    const title = element.querySelector("title");
    if (title) {
      element.dataset.tip = title.textContent;
      title.remove();  // the browser would show it, too
    }
    return element.dataset.tip;
  };
  const nearest = (svg, event) => [...svg.querySelectorAll(".line")].map(line => {
    let best = null, distance = Infinity;
    for (const dot of line.querySelectorAll(".dot")) {
      const box = dot.getBoundingClientRect(), far = Math.abs(box.x + box.width / 2 - event.clientX);
      if (far < distance) [best, distance] = [dot, far];
    }
    return distance < 30 ? best : null;
  }).filter(Boolean);
  const show = event => {
    const svg = event.target.closest?.("svg");
    document.querySelectorAll(".near").forEach(dot => dot.classList.remove("near"));
    const marked = event.target.closest?.("rect");
    const found = !svg ? [] : svg.classList.contains("lines") ? nearest(svg, event) : marked ? [marked] : [];
    const shown = found.map(text).filter(Boolean);
    found.forEach(dot => dot.classList.add("near"));
    tip.hidden = !shown.length;
    if (tip.hidden) return;
    tip.textContent = shown.join("\n");
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (event.clientY > box.height + 24 ? event.clientY - box.height - 16 : event.clientY + 20) + "px";
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);
})();
