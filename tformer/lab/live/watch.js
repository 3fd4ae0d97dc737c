// The live page: asks the server for what is new. Its drawings are those of a report, by page.js.
'use strict'

const EVERY = 1500 // milliseconds between questions
const MOST = 100 // rows of the table of arms
const state = { life: '', version: 0, arm: '', trial: '', arms: [], trials: [], wanted: '' }
const curves = new Map() // of each arm, by name
const at = (id) => document.getElementById(id)

const whole = (value) => Math.round(value).toLocaleString('en')
const steps = (each) => whole(each.step) + (each.num_steps ? '/' + whole(each.num_steps) : '')
const button = (text, onclick) => make('button', { type: 'button', class: 'sort', onclick }, text)
const row = (selected, ...cells) => make('tr', { 'aria-selected': String(selected) }, ...cells.map((cell) => make('td', {}, cell)))

function sparkline(arm) {
  const of = curves.get(arm) || {}, made = make('svg', { class: 'spark', viewBox: '0 0 110 22', 'aria-hidden': 'true' })
  const [x, y] = Object.values(of).reverse().find((curve) => curve[0].length > 2) || [[], []]
  const [across, up] = [scale(x, 1, 109, false, 0), scale(y, 20, 2, false, 0)]
  if (x.length) made.append(make('path', { d: 'M' + x.map((step, i) => `${across(step).toFixed(1)} ${up(y[i]).toFixed(1)}`).join('L') }))
  return made
}

function tables() {
  const found = state.arms.filter((line) => holds(line.arm, state.wanted))
  at('more').textContent = found.length > MOST ? `the first ${MOST} of ${whole(found.length)} are shown` : ''
  at('arms').replaceChildren(...found.slice(0, MOST).map((line) => row(line.arm === state.arm,
    button(line.arm, () => choose(line.arm)),
    Object.entries(line.states).map(([name, count]) => `${count} ${name}`).join(', '),
    steps(line), written(line.train), written(line.valid), sparkline(line.arm), written(line.mean), line.label || '-')))
  at('trials-title').textContent = state.arm ? `Trials of ${state.arm}` : 'Trials'
  at('trials').replaceChildren(...state.trials.map((each) => row(each.directory === state.trial,
    button(each.directory, () => { state.trial = each.directory; ask() }),
    each.state + (each.left ? `, ${each.left} left` : ''), steps(each), each.error || '')))
}

/** Shows the trials of an arm, and its curves among the others. */
function choose(arm) {
  Object.assign(state, { arm, trial: '' })
  const box = document.querySelectorAll('.choices input')[arms.indexOf(arm)]
  if (box && !box.checked) box.click()
  ask()
}

/** Draws what is known now. Arms keep their colours: new ones come last. */
function drawings(names) {
  const known = new Set(arms), added = state.arms.map((line) => line.arm).filter((arm) => !known.has(arm))
  for (const arm of added) if (arms.push(arm) <= data.drawn) chosen.add(arms.length - 1)
  data.steps = []
  for (const name of names) {
    data.curves[name] = arms.map((arm) => {
      const [x, y] = curves.get(arm)?.[name] || [[], []]
      return [data.steps.push(x) - 1, y, 0]
    })
  }
  const before = document.querySelector('.chooser')
  if (!before) begin()
  else if (added.length) before.replaceWith(chooser())
  redraw()
}

function take(found) {
  if (found.life !== state.life) curves.clear()
  Object.assign(state, { life: found.life, version: found.version })
  state.trials = found.arm === state.arm && found.trials ? found.trials : []
  if (!state.trial && state.trials.length) {
    state.trial = (state.trials.find((each) => each.state === 'running') || state.trials[0]).directory
  }
  if (found.arms) {
    state.arms = found.arms
    for (const [arm, of] of Object.entries(found.curves)) curves.set(arm, of)
    at('headline').textContent = found.headline
    at('about').textContent = found.about
    const heads = ['arm', 'trials', 'step', 'train loss', 'valid loss', 'curve', ...found.heads]
    at('head').replaceChildren(make('tr', {}, ...heads.map((name) => make('th', { scope: 'col' }, name))))
    at('broken').replaceChildren(...found.broken.map((line) => make('li', {}, line)))
    at('broken-part').hidden = !found.broken.length
    drawings(found.names)
  }
  tables()
}

let asking = false
async function ask() {
  if (asking) return
  asking = true
  try {
    const given = new URLSearchParams({ life: state.life, version: state.version, arm: state.arm })
    const found = await (await fetch(`state?${given}`)).json()
    if (found.error) throw new Error(found.error)
    take(found)
    if (state.trial) {
      const lines = await (await fetch(`log?${new URLSearchParams({ trial: state.trial })}`)).json()
      at('log').textContent = lines.length ? lines.join('\n') : 'there is no log'
    }
    at('problem').hidden = true
  } catch (error) {
    at('problem').textContent = `no answer: ${error.message}`
    at('problem').hidden = false
  }
  asking = false
}

at('options').prepend(finder('arms', (wanted) => { state.wanted = wanted; tables() }))
ask()
setInterval(ask, EVERY)
