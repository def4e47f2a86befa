// The search takes --batch_size as the name of a flag, not as words to leave out.
document.addEventListener("input", ({target}) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\s)-+/g, "$1");
}, true);
