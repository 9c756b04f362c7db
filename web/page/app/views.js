// On a narrow screen the page shows the swarm or the chat; on a wide one both.

export function views() {
  const buttons = [...document.querySelectorAll("[data-show]")];
  const show = (view) => {
    document.body.dataset.view = view;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.show === view));
  };
  for (const button of buttons) button.addEventListener("click", () => show(button.dataset.show));
  return show;
}
