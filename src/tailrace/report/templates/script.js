// Tooltips that show at once, also for fingers and the keyboard. Without this script the browser
// shows the same words by itself.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  for (const title of document.querySelectorAll("figure svg title, .whisker title")) {
    const mark = title.parentNode;
    mark.dataset.tip = title.textContent;
    mark.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x - box.width / 2, document.documentElement.clientWidth - box.width - 8))}px`;
    tip.style.top = `${y - box.height - 12 < 4 ? y + 16 : y - box.height - 12}px`;
  };
  const show = (mark, x, y) => {
    tip.textContent = mark.dataset.tip;
    tip.classList.add("on");
    place(x, y);
  };
  const hide = () => tip.classList.remove("on");
  const marked = (event) => event.target.closest && event.target.closest("[data-tip]");
  document.addEventListener("pointermove", (event) => {
    const mark = marked(event);
    if (mark) show(mark, event.clientX, event.clientY);
    else hide();
  });
  document.addEventListener("focusin", (event) => {
    const mark = marked(event);
    if (!mark) return hide();
    const box = mark.getBoundingClientRect();
    show(mark, box.x + box.width / 2, box.y);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true });
  // Paper has no folds.
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
  });
})();
