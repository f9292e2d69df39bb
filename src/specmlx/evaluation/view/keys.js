const rounds = [...document.querySelectorAll(".ribbon button")];
const detail = document.querySelector("output");

function select(i, focus) {
  const chosen = rounds[i];
  for (const [n, button] of rounds.entries()) {
    button.tabIndex = n === i ? 0 : -1;
    button.toggleAttribute("aria-current", n === i);
  }
  for (const token of document.querySelectorAll("#answer span")) {
    token.classList.toggle("on", token.dataset.round === String(i));
  }
  detail.textContent = chosen.getAttribute("aria-label");
  if (focus) chosen.focus();
}

function clear() {
  rounds.forEach((button) => button.removeAttribute("aria-current"));
  document.querySelectorAll("#answer .on").forEach((token) => token.classList.remove("on"));
  detail.textContent = "";
}

document.querySelector(".ribbon").addEventListener("keydown", (event) => {
  const at = rounds.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: rounds.length - 1 }[event.key];
  if (event.key === "Escape") clear();
  if (to === undefined || at < 0) return;
  event.preventDefault();
  select(Math.max(0, Math.min(rounds.length - 1, to)), true);
});
rounds.forEach((button, i) => button.addEventListener("click", () => select(i, true)));
document.querySelector("#answer").addEventListener("click", (event) => {
  if (event.target.dataset.round) select(Number(event.target.dataset.round), true);
});
